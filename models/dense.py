"""A small dense decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Dense", "DenseConfig"]


@dataclass(frozen=True)
class DenseConfig:
    """Sizes of a `Dense` model.

    Attributes:
        vocab_size: number of token ids.
        width: features of a token between blocks.
        layers: number of blocks.
        heads: query heads; `width` is a multiple of it, and `width / heads` is even.
        kv_heads: key and value heads; `heads` is a multiple of it.
        hidden: features inside the feed-forward part.
        rope_base: base of the rotary frequencies.
        norm_eps: added to the mean square before its root.
    """

    vocab_size: int = 258
    width: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 352
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} is not an even multiple of {self.heads} heads")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads are not a multiple of {self.kv_heads} kv_heads")


class Attention(nn.Module):
    """Causal attention with rotary positions and fewer key than query heads."""

    def __init__(self, config: DenseConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.kv_heads = config.kv_heads
        self.head_width = config.width // config.heads
        kv_width = self.head_width * config.kv_heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, kv_width, bias=False)
        self.value = nn.Linear(config.width, kv_width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attends from each token of `x` [batch, length, width] to itself and those before it."""
        batch, length, width = x.shape
        query = self.query(x).view(batch, length, self.heads, self.head_width).transpose(1, 2)
        key = self.key(x).view(batch, length, self.kv_heads, self.head_width).transpose(1, 2)
        value = self.value(x).view(batch, length, self.kv_heads, self.head_width).transpose(1, 2)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    """SwiGLU: a gated feed-forward part."""

    def __init__(self, config: DenseConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `x` [batch, length, width] to the same shape."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention, then the feed-forward part, each added to what came in."""

    def __init__(self, config: DenseConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Maps `x` [batch, length, width] to the same shape."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Dense(nn.Module):
    """A decoder that maps token ids to the logits of the next token.

    Args:
        config: the sizes.
    """

    inverse_frequency: Tensor

    def __init__(self, config: DenseConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        frequencies = inverse_frequencies(config.width // config.heads, config.rope_base)
        self.register_buffer("inverse_frequency", frequencies, persistent=False)
        self.apply(self._initialise)

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

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Attention):
            nn.init.normal_(module.output.weight, std=0.02 / (2 * self.config.layers) ** 0.5)


def inverse_frequencies(head_width: int, base: float) -> Tensor:
    """Rotary frequencies of a head, float32 [head_width / 2]."""
    return base ** -(torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)


def rotary_tables(inverse_frequency: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, [length, width / 2], in the dtype of `x` [batch, length, …]."""
    position = torch.arange(x.shape[1], device=x.device)
    angle = position[:, None] * inverse_frequency
    return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns feature pairs of `x` [batch, heads, length, width] by angles given as `cos`, `sin` [length, width / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
