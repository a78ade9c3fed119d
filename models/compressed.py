"""A small decoder with compressed attention: windows of tokens are pooled into entries, of which a query reads some.

After DeepSeek-V4: layers that see a sliding window of tokens alone, layers that see the best of many small entries
besides, and layers that see all of few large ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tree_compile.models.dense import DenseConfig, FeedForward, inverse_frequencies, rotary_tables, rotate

__all__ = ["Compressed", "CompressedConfig"]


@dataclass(frozen=True)
class CompressedConfig:
    """Sizes of a `Compressed` model.

    Attributes:
        vocab_size: number of token ids.
        width: features of a token between blocks.
        layers: number of blocks; of every three the first sees tokens alone, the second chosen entries, the third all.
        heads: query heads; all share one key and value head.
        head_width: features of a head, an even number.
        sliding_window: tokens that a query sees, itself among them.
        small_window: tokens of a window whose entry is chosen; half of an entry is pooled from the window before.
        large_window: tokens of a window whose entry is always seen.
        index_heads: heads of the indexer that chooses.
        index_width: features of each of them, an even number.
        entries_per_token: how many entries a query reads at the most, where they are chosen.
        hidden: features inside the feed-forward part.
        rope_base: base of the rotary frequencies.
        norm_eps: added to the mean square before its root.
    """

    vocab_size: int = 258
    width: int = 128
    layers: int = 3
    heads: int = 4
    head_width: int = 32
    sliding_window: int = 16
    small_window: int = 4
    large_window: int = 16
    index_heads: int = 32
    index_width: int = 8
    entries_per_token: int = 8
    hidden: int = 352
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6

    @property
    def feed_forward(self) -> DenseConfig:
        """Sizes of the feed-forward part."""
        return DenseConfig(width=self.width, hidden=self.hidden)


class Compressor(nn.Module):
    """Pools every window of tokens into one entry, each feature by a softmax over the tokens.

    With overlap an entry is pooled from the tokens of its own window and of the one before, by weights of their own.
    """

    inverse_frequency: Tensor

    def __init__(self, config: CompressedConfig, width: int, window: int, *, overlaps: bool) -> None:
        super().__init__()
        self.window = window
        self.overlaps = overlaps
        self.width = width * (2 if overlaps else 1)
        self.value = nn.Linear(config.width, self.width, bias=False)
        self.gate = nn.Linear(config.width, self.width, bias=False)
        self.place = nn.Parameter(torch.zeros(window, self.width))
        self.norm = nn.RMSNorm(width, eps=config.norm_eps)
        self.register_buffer("inverse_frequency", inverse_frequencies(width, config.rope_base), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The entries [batch, length // window, width] of `x` [batch, length, features]; what is left over has none."""
        windows = x.shape[1] // self.window
        whole = slice(0, windows * self.window)
        shape = (x.shape[0], windows, self.window, self.width)
        value, gate = self.value(x)[:, whole].view(shape), self.gate(x)[:, whole].view(shape) + self.place
        if self.overlaps:
            value, gate = with_window_before(value, 0.0), with_window_before(gate, -torch.inf)
        entries = self.norm((value * gate.softmax(2)).sum(2))
        angle = (torch.arange(windows, device=x.device) * self.window)[:, None] * self.inverse_frequency
        return rotate(entries, angle.cos().to(x.dtype), angle.sin().to(x.dtype))


def with_window_before(x: Tensor, fill: float) -> Tensor:
    """The first half of the features from the tokens of the window before, the second half from a window's own tokens.

    Args:
        x: [batch, windows, tokens, 2 * width].
        fill: stands where there is no window before.

    Returns:
        [batch, windows, 2 * tokens, width].
    """
    before, own = x.chunk(2, dim=-1)
    shifted = F.pad(before, (0, 0, 0, 0, 1, 0), value=fill)[:, : x.shape[1]]
    return torch.cat([shifted, own], dim=2)


def closed(length: int, window: int, device: torch.device) -> Tensor:
    """Whether a window has ended when a token comes, with it or before it: bool [length, length // window]."""
    token, entry = torch.arange(length, device=device), torch.arange(length // window, device=device)
    return entry < (token[:, None] + 1) // window


class Indexer(nn.Module):
    """Chooses for every token the entries whose keys match its queries best."""

    def __init__(self, config: CompressedConfig) -> None:
        super().__init__()
        self.heads = config.index_heads
        self.keep = config.entries_per_token
        self.query = nn.Linear(config.width, config.index_heads * config.index_width, bias=False)
        self.weight = nn.Linear(config.width, config.index_heads, bias=False)
        self.key = Compressor(config, config.index_width, config.small_window, overlaps=True)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """Which of the entries that are `seen` [length, entries] it keeps for `x`: bool [batch, length, entries]."""
        query, key = self.query(x).unflatten(-1, (self.heads, -1)), self.key(x)
        matches = (query @ key.transpose(-1, -2)[:, None]).relu()
        scores = (matches * self.weight(x)[..., None]).sum(2).masked_fill(~seen, -torch.inf)
        best = scores.topk(min(self.keep, seen.shape[1]), dim=-1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & seen


class Attention(nn.Module):
    """Attention over the nearest tokens and over entries, in one softmax; keys are values."""

    def __init__(self, config: CompressedConfig, window: int, *, chooses: bool) -> None:
        super().__init__()
        self.sliding_window = config.sliding_window
        self.window = window
        self.heads, self.head_width = config.heads, config.head_width
        self.query = nn.Linear(config.width, config.heads * config.head_width, bias=False)
        self.key = nn.Linear(config.width, config.head_width, bias=False)
        self.norm = nn.RMSNorm(config.head_width, eps=config.norm_eps)
        self.output = nn.Linear(config.heads * config.head_width, config.width, bias=False)
        self.entries = Compressor(config, config.head_width, window, overlaps=chooses) if window else None
        self.indexer = Indexer(config) if chooses else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Maps `x` [batch, length, width] to the same shape."""
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, self.heads, self.head_width).transpose(1, 2)
        query, key = rotate(query, cos, sin), rotate(self.norm(self.key(x))[:, None], cos, sin)
        token = torch.arange(length, device=x.device)
        distance = token[:, None] - token
        seen = ((distance >= 0) & (distance < self.sliding_window)).expand(batch, 1, length, length)
        if self.entries is not None:
            entries = closed(length, self.window, x.device)
            if self.indexer is not None:
                entries = self.indexer(x, entries)[:, None]
            seen = torch.cat([seen, entries.expand(batch, 1, -1, -1)], dim=-1)
            key = torch.cat([key, self.entries(x)[:, None]], dim=2)
        mixed = F.scaled_dot_product_attention(query, key, key, attn_mask=seen, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then the feed-forward part, each added to what came in."""

    def __init__(self, config: CompressedConfig, number: int) -> None:
        super().__init__()
        window = (0, config.small_window, config.large_window)[number % 3]
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config, window, chooses=number % 3 == 1)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.feed_forward = FeedForward(config.feed_forward)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Maps `x` [batch, length, width] to the same shape."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Compressed(nn.Module):
    """A decoder that maps token ids to the logits of the next token.

    Args:
        config: the sizes.
    """

    inverse_frequency: Tensor

    def __init__(self, config: CompressedConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config, number) for number in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        frequencies = inverse_frequencies(config.head_width, config.rope_base)
        self.register_buffer("inverse_frequency", frequencies, persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Computes logits.

        Args:
            input_ids: integer token ids [batch, length].

        Returns:
            Logits of the next token [batch, length, vocab_size].
        """
        x = self.embedding(input_ids)
        cos, sin = rotary_tables(self.inverse_frequency, x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))
