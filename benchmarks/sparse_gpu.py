"""Sparse index attention by TileLang's kernels on a Hopper GPU: python benchmarks/sparse_gpu.py.

First exactness: outputs and gradients in bfloat16 against gathered keys and values in float32. Then milliseconds of
forward and backward against dense attention with the same choice as a mask, for rows of 4k to 64k tokens of which every
query chooses up to 2048 ancestors. A dash where dense attention does not fit into memory.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tree_compile.runtime import sparse_kernels

CHOSEN = 2048
FORMS = {
    # heads, width, value width
    "latent attention": (128, 576, 512),
    "multi-query attention": (64, 128, 128),
}


def inputs_of(form: str, tokens: int) -> list[Tensor]:
    """Query, key and value in bfloat16; the query lies in memory as a projection leaves it."""
    heads, width, value_width = FORMS[form]
    query = torch.randn(1, tokens, heads, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    key, value = (torch.randn(1, 1, tokens, size, device="cuda", dtype=torch.bfloat16) for size in (width, value_width))
    return [query, key, value]


def chosen_indices(tokens: int, chosen: int) -> Tensor:
    """int32 [1, T, K]: for every query random ones of the tokens up to itself, and -1 where there are fewer than K."""
    parts = []
    for queries in torch.arange(tokens, device="cuda").split(1024):
        order = torch.rand(len(queries), tokens, device="cuda")
        order.masked_fill_(torch.arange(tokens, device="cuda") > queries[:, None], -1.0)
        found = order.topk(chosen)
        parts.append(found.indices.where(found.values >= 0, -1).to(torch.int32))
    return torch.cat(parts)[None]


def by_gathering(query: Tensor, key: Tensor, value: Tensor, indices: Tensor, scale: float) -> Tensor:
    """The plain form: a copy of the chosen keys and values for every query."""
    rows, is_chosen = indices[0].clamp(min=0), indices[0] >= 0
    scores = scale * torch.einsum("htd,tkd->htk", query[0], key[0, 0][rows])
    weights = scores.masked_fill(~is_chosen, float("-inf")).softmax(-1)
    return torch.einsum("htk,tke->hte", weights, value[0, 0][rows])[None]


def dense_mask(indices: Tensor) -> Tensor:
    """bool [T, T] of indices."""
    tokens = indices.shape[1]
    mask = torch.zeros(tokens, tokens + 1, dtype=torch.bool, device="cuda")
    return mask.scatter_(1, indices[0].long().where(indices[0] >= 0, tokens), value=True)[:, :tokens]


def greatest_difference(form: str) -> float:
    """Relative to the greatest number of the output or of a gradient."""
    inputs, indices = inputs_of(form, 512), chosen_indices(512, 200)
    scale = inputs[0].shape[3] ** -0.5
    leaves = [tensor.float().requires_grad_() for tensor in inputs]
    expected = by_gathering(*leaves, indices, scale)
    grad = torch.randn_like(expected).bfloat16()
    out, lse = sparse_kernels.forward(*inputs, indices, scale)
    found = (out, *sparse_kernels.backward(grad, *inputs, indices, scale, out, lse))
    pairs = zip(found, (expected, *torch.autograd.grad(expected, leaves, grad.float())), strict=True)
    # Python's max would drop nan.
    return float(torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs]).max())


def milliseconds(step: Callable[[], object], rounds: int) -> float:
    """Median over the rounds, after one that compiles."""
    times = []
    for _ in range(rounds + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[1:])


def kernel_times(inputs: list[Tensor], indices: Tensor, rounds: int) -> list[float]:
    """Of forward and backward by the kernels."""
    scale = inputs[0].shape[3] ** -0.5
    forward = partial(sparse_kernels.forward, *inputs, indices, scale)
    out, lse = forward()
    grad = torch.randn_like(out)
    backward = partial(sparse_kernels.backward, grad, *inputs, indices, scale, out, lse)
    return [milliseconds(forward, rounds), milliseconds(backward, rounds)]


def dense_times(inputs: list[Tensor], indices: Tensor, rounds: int) -> list[float]:
    """Of forward and backward by `scaled_dot_product_attention` with a mask; none if it does not fit into memory."""
    try:
        mask = dense_mask(indices)
        leaves = [tensor.expand(-1, inputs[0].shape[1], -1, -1).detach().requires_grad_() for tensor in inputs]
        forward = partial(torch.nn.functional.scaled_dot_product_attention, *leaves, attn_mask=mask)
        out = forward()
        backward = partial(torch.autograd.grad, out, leaves, torch.randn_like(out), retain_graph=True)
        return [milliseconds(forward, rounds), milliseconds(backward, rounds)]
    except torch.OutOfMemoryError:
        return []


def measure(form: str, rounds: int) -> None:
    """Prints one line for every length."""
    print(f"{form}, {FORMS[form]}: greatest relative difference {greatest_difference(form):.1e}", flush=True)
    print(f"{'tokens':>8}{'forward':>10}{'backward':>10}{'dense forward':>15}{'dense backward':>16}   ms")
    for tokens in (4096, 8192, 16384, 32768, 65536):
        inputs, indices = inputs_of(form, tokens), chosen_indices(tokens, CHOSEN)
        ours, dense = kernel_times(inputs, indices, rounds), dense_times(inputs, indices, rounds)
        theirs = [f"{time:.1f}" for time in dense] or ["-", "-"]
        print(f"{tokens:8}{ours[0]:10.1f}{ours[1]:10.1f}{theirs[0]:>15}{theirs[1]:>16}", flush=True)


def main() -> None:
    """Checks and measures every form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    if not torch.cuda.is_available() or not sparse_kernels.kernels_can(*inputs_of("latent attention", 1)):
        print("needs a Hopper GPU and tilelang")
        return
    torch.manual_seed(0)
    for form in FORMS:
        measure(form, rounds)


if __name__ == "__main__":
    main()
