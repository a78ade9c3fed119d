"""Operators over a tree on one device, in one precision, against float64: outputs and all gradients."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from tree_compile.runtime.attention import tree_attention
from tree_compile.runtime.causal_convolution import causal_convolution
from tree_compile.runtime.linear_recurrence import delta_rule
from tree_compile.runtime.planning import plan_rows
from tree_compile.runtime.row import Row
from tree_compile.runtime.row_tree import RowTree, tree_of_segments
from tree_compile.runtime.sparse_attention import sparse_attention

Inputs = dict[str, Tensor]
Function = Callable[[Inputs], Tensor]

ALLOWED = {torch.float32: 2e-5, torch.bfloat16: 5e-2}
"""A difference that rounding explains; one wrong token makes more, and so would TF32."""


@dataclass(frozen=True)
class Case:
    """An operator with its inputs.

    Attributes:
        name: as printed.
        inputs: float64 on the CPU, of numbers that bfloat16 has.
        run: the operator, for inputs on the device.
        definition: what it has to compute, for `inputs`, in plain operations of torch.
        tokens: T, the size of one dimension of the output and of some inputs, and of no other.
        dtypes: in which it can be computed.
    """

    name: str
    inputs: Inputs
    run: Function
    definition: Function
    tokens: int
    dtypes: tuple[torch.dtype, ...] = tuple(ALLOWED)

    @cached_property
    def expected(self) -> list[Tensor]:
        """The output and all gradients by the definition, which takes seconds and is the same for all precisions."""
        return _results(self.definition, self.inputs)


def cases(device: torch.device, tokens: int) -> Iterator[Case]:
    """All operators.

    Args:
        device: where they are to run.
        tokens: at least so many are in the random tree, and at most 90 more.
    """
    row = _random_row(tokens)
    yield from _attention_cases(row, device)
    count, tree, chosen = len(row.tokens), tree_of_segments(row.segments, row.parent).to(device), _chosen(row, 100)
    inputs = _convolution_inputs(count)
    yield Case("convolution", inputs, partial(_convolve, tree), partial(_convolve_by_path, row), count)
    inputs = _delta_inputs(count)
    yield Case("gated delta rule", inputs, partial(_delta, tree), partial(_delta_by_token, row), count)
    # Latent attention, as DeepSeek-V3.2 has it.
    inputs = _attention_inputs(count, heads=128, kv_heads=1, width=576, value_width=512)
    run, definition = partial(_sparse, chosen.to(device)), partial(_dense_chosen, chosen)
    yield Case("sparse attention", inputs, run, definition, count)


def greatest_difference(case: Case, device: torch.device, dtype: torch.dtype) -> float:
    """Of any token in the output or in a gradient, relative to the norm of what that token should have.

    A norm below the median counts as the median: gradients may be 0. Relative to the greatest number, nothing would be
    seen of a token far from the root, whose attention averages over many values.
    """
    found = _results(case.run, {name: value.to(device, dtype) for name, value in case.inputs.items()})
    gaps = [_gap(a.cpu().double(), b, case.tokens) for a, b in zip(found, case.expected, strict=True)]
    # Python's max would drop nan.
    return float(torch.stack(gaps).max())


def _gap(found: Tensor, expected: Tensor, tokens: int) -> Tensor:
    norms = _norms(expected, tokens)
    return (_norms(found - expected, tokens) / norms.clamp(min=norms.median())).max()


def _norms(tensor: Tensor, tokens: int) -> Tensor:
    """Of every token, [T]; of the whole where it has no tokens."""
    return torch.linalg.vector_norm(tensor, dim=[dim for dim, size in enumerate(tensor.shape) if size != tokens])


def _results(function: Function, inputs: Inputs) -> list[Tensor]:
    leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
    out = function(leaves)
    # In a sum of alike numbers with alternating signs, rounding would look like an error.
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), weights.to(out.device, out.dtype))]


def _random_row(tokens: int) -> Row:
    rng, paths, computed = random.Random(0), [[0]], 1
    while computed < tokens:
        above = rng.choice(paths)
        run = [rng.randrange(1 << 30) for _ in range(rng.choice([1, 90]))]
        paths.append(above[: rng.randint(1, len(above))] + run)
        computed += len(run)
    (row,) = plan_rows(paths, min_shared_tokens=1).rows
    return row


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16().double()


# Attention

_ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {}, "flash": {"kernels": "flash"}, "window": {"window": 50}, "softcap": {"softcap": 2.0},
    "flash, softcap": {"kernels": "flash", "softcap": 2.0}, "sinks": {"sinks": True}, "width 256": {},
}  # fmt: skip
_SHAPES = {"width 256": {"width": 256, "kv_heads": 1}}


def _attention_cases(row: Row, device: torch.device) -> Iterator[Case]:
    for name, options in _ATTENTION.items():
        if name == "flash, softcap" and importlib.util.find_spec("flash_attn") is None:
            continue
        inputs = _attention_inputs(len(row.tokens), **_SHAPES.get(name, {}))
        if options.get("sinks"):
            inputs["sinks"] = _normal(8)
        run, definition = partial(_attend, row, device, options), partial(_dense, row, options)
        dtypes = (torch.bfloat16,) if options.get("kernels") == "flash" else tuple(ALLOWED)
        yield Case(f"attention, {name}", inputs, run, definition, len(row.tokens), dtypes)


def _attention_inputs(
    tokens: int, heads: int = 8, kv_heads: int = 2, width: int = 128, value_width: int | None = None
) -> Inputs:
    return {
        "query": _normal(1, heads, tokens, width),
        "key": _normal(1, kv_heads, tokens, width),
        "value": _normal(1, kv_heads, tokens, value_width or width),
    }


def _attend(row: Row, device: torch.device, options: dict[str, Any], inputs: Inputs) -> Tensor:
    position, subtree_end = (torch.from_numpy(part).to(device) for part in (row.position, row.subtree_end))
    settings = {name: value for name, value in options.items() if name != "sinks"}
    return tree_attention(
        **inputs, segments=torch.from_numpy(row.segments), position=position, subtree_end=subtree_end,
        scale=inputs["query"].shape[3] ** -0.5, **settings,
    )  # fmt: skip


def _dense(row: Row, options: dict[str, Any], inputs: Inputs) -> Tensor:
    """All scores, of which those of ancestors are kept."""
    rows, position = torch.arange(len(row.tokens)), torch.from_numpy(row.position)
    visible = (rows <= rows[:, None]) & (rows[:, None] < torch.from_numpy(row.subtree_end))
    visible &= position[:, None] - position < options.get("window", len(rows))
    scores = _products(inputs["query"], inputs["key"])
    if cap := options.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    return _weighed(scores.masked_fill(~visible, -torch.inf), inputs)


def _products(query: Tensor, key: Tensor) -> Tensor:
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return query @ key.mT * query.shape[3] ** -0.5


def _weighed(scores: Tensor, inputs: Inputs) -> Tensor:
    """Values by the softmax of scores, to which a sink may belong."""
    value = inputs["value"].repeat_interleave(scores.shape[1] // inputs["value"].shape[1], 1)
    if (sinks := inputs.get("sinks")) is None:
        return scores.softmax(-1) @ value
    with_sink = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return with_sink.softmax(-1)[..., :-1] @ value


def _chosen(row: Row, most: int) -> Tensor:
    """int32 [1, T, most]: ancestors of every token, the last ones, as numbers of rows; -1 where there are fewer."""
    chosen, path = torch.full((1, len(row.tokens), most), -1, dtype=torch.int32), _paths(row)
    for token, above in enumerate(path):
        kept = torch.tensor(above[-most:], dtype=torch.int32)
        chosen[0, token, : len(kept)] = kept
    return chosen


def _paths(row: Row) -> list[list[int]]:
    """Every token's ancestors, itself the last."""
    paths: list[list[int]] = []
    for token, parent in enumerate(row.parent.tolist()):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths


def _sparse(chosen: Tensor, inputs: Inputs) -> Tensor:
    return sparse_attention(**inputs, indices=chosen, scale=inputs["query"].shape[3] ** -0.5)


def _dense_chosen(chosen: Tensor, inputs: Inputs) -> Tensor:
    tokens = chosen.shape[1]
    index = chosen[0].long().where(chosen[0] >= 0, tokens)
    visible = torch.zeros(tokens, tokens + 1, dtype=torch.bool).scatter_(1, index, True)[:, :tokens]
    return _weighed(_products(inputs["query"], inputs["key"]).masked_fill(~visible, -torch.inf), inputs)


# What carries a state


def _convolution_inputs(tokens: int) -> Inputs:
    return {"values": _normal(1, tokens, 256), "weight": _normal(256, 4), "bias": _normal(256)}


def _convolve(tree: RowTree, inputs: Inputs) -> Tensor:
    return causal_convolution(**inputs, tree=tree)


def _convolve_by_path(row: Row, inputs: Inputs) -> Tensor:
    weight, values = inputs["weight"], torch.nn.functional.pad(inputs["values"][0], (0, 0, 0, 1))
    last = [[-1] * 4 + path for path in _paths(row)]
    taken = values[torch.tensor([path[-weight.shape[1] :] for path in last])]
    return (torch.einsum("tkd,dk->td", taken, weight) + inputs["bias"])[None]


def _delta_inputs(tokens: int, heads: int = 4, width: int = 128) -> Inputs:
    wide = {name: _normal(1, tokens, heads, width) for name in ("query", "key", "value")}
    gates = {"beta": _normal(1, tokens, heads).sigmoid(), "decay": -_normal(1, tokens, heads).exp()}
    return wide | {name: gate.bfloat16().double() for name, gate in gates.items()}


def _delta(tree: RowTree, inputs: Inputs) -> Tensor:
    return delta_rule(**inputs, tree=tree, normalize=True)[0]


def _delta_by_token(row: Row, inputs: Inputs) -> Tensor:
    """The state of every token from that of the token before it."""
    query, key = (_of_length_1(inputs[name][0]) for name in ("query", "key"))
    value, beta, decay = (inputs[name][0] for name in ("value", "beta", "decay"))
    states: list[Tensor] = []
    for token, parent in enumerate(row.parent.tolist()):
        above = states[parent] if parent >= 0 else value.new_zeros(*key.shape[1:], value.shape[2])
        state = above * decay[token].exp()[:, None, None]
        missing = value[token] - torch.einsum("hd,hde->he", key[token], state)
        states.append(state + torch.einsum("hd,he,h->hde", key[token], missing, beta[token]))
    return torch.einsum("thd,thde->the", query, torch.stack(states))[None] * query.shape[2] ** -0.5


def _of_length_1(values: Tensor) -> Tensor:
    return values * (values.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
