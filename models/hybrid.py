"""A small hybrid decoder: gated delta rule with short convolutions, full attention every fourth block, and experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tree_compile.models.dense import Attention, DenseConfig, inverse_frequencies, rotary_tables
from tree_compile.runtime.linear_recurrence import delta_rule

__all__ = ["Hybrid", "HybridConfig"]


@dataclass(frozen=True)
class HybridConfig:
    """Sizes of a `Hybrid` model.

    Attributes:
        vocab_size: number of token ids.
        width: features of a token between blocks.
        layers: number of blocks.
        attention_every: the last of every so many blocks has attention, the others a gated delta rule.
        heads: query heads of the attention; `width / heads` is even.
        kv_heads: key and value heads of the attention; `heads` is a multiple of it.
        key_heads: query and key heads of the delta rule.
        value_heads: value heads of the delta rule, a multiple of `key_heads`.
        head_width: features of each head of the delta rule.
        conv_width: tokens that the short convolution sees.
        experts: number of experts.
        experts_per_token: how many of them a token goes to.
        hidden: features inside an expert.
        rope_base: base of the rotary frequencies.
        norm_eps: added to the mean square before its root.
    """

    vocab_size: int = 258
    width: int = 128
    layers: int = 4
    attention_every: int = 4
    heads: int = 4
    kv_heads: int = 2
    key_heads: int = 2
    value_heads: int = 4
    head_width: int = 32
    conv_width: int = 4
    experts: int = 4
    experts_per_token: int = 2
    hidden: int = 128
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(f"{self.value_heads} value_heads are not a multiple of {self.key_heads} key_heads")
        if not 0 < self.experts_per_token <= self.experts:
            raise ValueError(f"a token cannot go to {self.experts_per_token} of {self.experts} experts")

    @property
    def attention(self) -> DenseConfig:
        """Sizes of the attention."""
        return DenseConfig(width=self.width, heads=self.heads, kv_heads=self.kv_heads)


class DeltaNet(nn.Module):
    """Gated delta rule (Yang et al., Gated Delta Networks, 2024) over values that a short convolution has mixed."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        self.widths = [config.key_heads * config.head_width] * 2 + [config.value_heads * config.head_width]
        channels = sum(self.widths)
        self.project = nn.Linear(config.width, channels, bias=False)
        self.convolution = nn.Conv1d(
            channels, channels, config.conv_width, groups=channels, padding=config.conv_width - 1, bias=False
        )
        self.gate = nn.Linear(config.width, self.widths[-1], bias=False)
        self.decay_and_beta = nn.Linear(config.width, 2 * config.value_heads, bias=False)
        self.rate = nn.Parameter(torch.zeros(config.value_heads))
        self.step = nn.Parameter(torch.ones(config.value_heads))
        self.norm = nn.RMSNorm(config.head_width, eps=config.norm_eps)
        self.output = nn.Linear(self.widths[-1], config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Carries a state along the tokens of `x` [batch, length, width]."""
        length = x.shape[1]
        mixed = F.silu(self.convolution(self.project(x).transpose(1, 2))[..., :length]).transpose(1, 2)
        query, key, value = (part.unflatten(-1, (-1, self.config.head_width)) for part in mixed.split(self.widths, -1))
        decay, beta = self.decay_and_beta(x).chunk(2, dim=-1)
        decay = -self.rate.exp() * F.softplus(decay + self.step)
        out, _ = delta_rule(query, key, value, beta.sigmoid(), decay, normalize=True)
        return self.output(self.norm(out).flatten(-2) * F.silu(self.gate(x)))


class Experts(nn.Module):
    """SwiGLU experts, of which every token goes to the few that a router gives the greatest weight."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.per_token = config.experts_per_token
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.up = nn.Parameter(torch.empty(config.experts, 2 * config.hidden, config.width))
        self.down = nn.Parameter(torch.empty(config.experts, config.width, config.hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Maps `x` [batch, length, width] to the same shape."""
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(self.per_token, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        result = torch.zeros_like(rows)
        for expert in range(len(self.up)):
            row, slot = torch.where(chosen == expert)
            gate, up = F.linear(rows[row], self.up[expert]).chunk(2, dim=-1)
            states = F.linear(F.silu(gate) * up, self.down[expert])
            result = result.index_add(0, row, (states * weights[row, slot, None]).to(result.dtype))
        return result.view_as(x)


class Block(nn.Module):
    """A delta rule or an attention, then experts, each added to what came in."""

    def __init__(self, config: HybridConfig, *, has_attention: bool) -> None:
        super().__init__()
        self.has_attention = has_attention
        self.mixer_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.mixer = Attention(config.attention) if has_attention else DeltaNet(config)
        self.experts_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.experts = Experts(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Maps `x` [batch, length, width] to the same shape."""
        normed = self.mixer_norm(x)
        x = x + (self.mixer(normed, cos, sin) if self.has_attention else self.mixer(normed))
        return x + self.experts(self.experts_norm(x))


class Hybrid(nn.Module):
    """A decoder that maps token ids to the logits of the next token.

    Args:
        config: the sizes.
    """

    inverse_frequency: Tensor

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        every = config.attention_every
        self.blocks = nn.ModuleList(
            Block(config, has_attention=number % every == every - 1) for number in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        frequencies = inverse_frequencies(config.width // config.heads, config.rope_base)
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
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, Experts):
        nn.init.normal_(module.up, std=0.02)
        nn.init.normal_(module.down, std=0.02)
