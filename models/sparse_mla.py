"""A small decoder with latent attention over the tokens that an indexer chooses, as in DeepSeek-V3.2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tree_compile.models.dense import DenseConfig, FeedForward, inverse_frequencies, rotary_tables, rotate

__all__ = ["SparseMLA", "SparseMLAConfig"]


@dataclass(frozen=True)
class SparseMLAConfig:
    """Sizes of a `SparseMLA` model.

    Attributes:
        vocab_size: number of token ids.
        width: features of a token between blocks.
        layers: number of blocks.
        heads: query heads.
        latent: features of a token that all heads read as key and as value.
        rotary: features of a token's key that know its position, even.
        chosen: tokens that a query attends to.
        index_heads: heads of the indexer.
        index_width: features of each of them; the first `rotary` know the position.
        index_every: the first of every so many blocks has an indexer, whose choice the others take.
        hidden: features inside the feed-forward layer.
        rope_base: base of the rotary frequencies.
        norm_eps: added to the mean square before its root.
    """

    vocab_size: int = 258
    width: int = 128
    layers: int = 4
    heads: int = 4
    latent: int = 32
    rotary: int = 16
    chosen: int = 64
    index_heads: int = 32
    index_width: int = 32
    index_every: int = 2
    hidden: int = 256
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6


class Indexer(nn.Module):
    """Scores all tokens up to a query by sum_h w_h relu(q_h . k), and names the best (DeepSeek-V3.2, 2025)."""

    def __init__(self, config: SparseMLAConfig) -> None:
        super().__init__()
        self.config = config
        self.query = nn.Linear(config.width, config.index_heads * config.index_width, bias=False)
        self.key = nn.Linear(config.width, config.index_width, bias=False)
        self.weights = nn.Linear(config.width, config.index_heads, bias=False)

    @torch.no_grad()
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Numbers of the chosen tokens [batch, length, chosen], or of all where there are fewer."""
        length, rotary = x.shape[1], self.config.rotary
        query = self.query(x).unflatten(-1, (self.config.index_heads, -1))
        query = torch.cat([rotate(query[..., :rotary], cos[:, None], sin[:, None]), query[..., rotary:]], -1)
        key = self.key(x)
        key = torch.cat([rotate(key[..., :rotary], cos, sin), key[..., rotary:]], -1)
        scores = torch.einsum("bqhd,bkd->bqhk", query, key).relu()
        scores = torch.einsum("bqhk,bqh->bqk", scores, self.weights(x))
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        return scores.masked_fill(later, float("-inf")).topk(min(self.config.chosen, length), dim=-1).indices


class LatentAttention(nn.Module):
    """Every head reads the same latent of a token, through matrices of its own (DeepSeek-V2, 2024)."""

    def __init__(self, config: SparseMLAConfig) -> None:
        super().__init__()
        self.config = config
        self.query = nn.Linear(config.width, config.heads * (config.latent + config.rotary), bias=False)
        self.latent = nn.Linear(config.width, config.latent, bias=False)
        self.latent_norm = nn.RMSNorm(config.latent, eps=config.norm_eps)
        self.rotary_key = nn.Linear(config.width, config.rotary, bias=False)
        self.output = nn.Linear(config.heads * config.latent, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, chosen: Tensor) -> Tensor:
        """Attends to the tokens `chosen` [batch, length, k] that are not after the query."""
        batch, length, _ = x.shape
        latent, rotary = self.config.latent, self.config.rotary
        query = self.query(x).unflatten(-1, (self.config.heads, -1))
        query = torch.cat([query[..., :latent], rotate(query[..., latent:], cos[:, None], sin[:, None])], -1)
        keys = torch.cat([self.latent_norm(self.latent(x)), rotate(self.rotary_key(x), cos, sin)], -1)
        row = torch.arange(batch, device=x.device)[:, None, None]
        keys = keys[row, chosen]
        scores = torch.einsum("bqhd,bqkd->bqhk", query, keys) * (latent + rotary) ** -0.5
        later = chosen > torch.arange(length, device=x.device)[:, None]
        weights = scores.masked_fill(later[:, :, None], float("-inf")).softmax(-1)
        return self.output(torch.einsum("bqhk,bqkd->bqhd", weights, keys[..., :latent]).flatten(-2))


class Block(nn.Module):
    """Attention, then a feed-forward layer, each added to what came in."""

    def __init__(self, config: SparseMLAConfig, *, has_indexer: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.indexer = Indexer(config) if has_indexer else None
        self.attention = LatentAttention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.feed_forward = FeedForward(DenseConfig(width=config.width, heads=1, kv_heads=1, hidden=config.hidden))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, chosen: Tensor | None) -> tuple[Tensor, Tensor]:
        """Maps `x` [batch, length, width] to the same shape; gives on which tokens were chosen."""
        normed = self.attention_norm(x)
        if self.indexer is not None:
            chosen = self.indexer(normed, cos, sin)
        assert chosen is not None
        x = x + self.attention(normed, cos, sin, chosen)
        return x + self.feed_forward(self.feed_forward_norm(x)), chosen


class SparseMLA(nn.Module):
    """A decoder that maps token ids to the logits of the next token.

    Args:
        config: the sizes.
    """

    inverse_frequency: Tensor

    def __init__(self, config: SparseMLAConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(
            Block(config, has_indexer=number % config.index_every == 0) for number in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        frequencies = inverse_frequencies(config.rotary, config.rope_base)
        self.register_buffer("inverse_frequency", frequencies, persistent=False)
        self.apply(_initialise)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Computes logits.

        Args:
            input_ids: integer token ids [batch, length].

        Returns:
            Logits of the next token [batch, length, vocab_size].
        """
        x = self.embedding(input_ids)
        cos, sin = rotary_tables(self.inverse_frequency, x)
        chosen = None
        for block in self.blocks:
            x, chosen = block(x, cos, sin, chosen)
        return self.head(self.norm(x))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
