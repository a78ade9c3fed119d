"""Times of sparse index attention by TileLang's kernels on a Hopper GPU: python benchmarks/sparse_gpu.py.

Milliseconds of forward and backward against dense attention with the same choice as a mask, for rows of 4k to 64k
tokens of which every query chooses up to 2048 ancestors. A dash where dense attention does not fit into memory.
`python benchmarks/gpu.py operators` says whether the kernels are exact.
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


def dense_mask(indices: Tensor) -> Tensor:
    """bool [T, T] of indices."""
    tokens = indices.shape[1]
    mask = torch.zeros(tokens, tokens + 1, dtype=torch.bool, device="cuda")
    return mask.scatter_(1, indices[0].long().where(indices[0] >= 0, tokens), value=True)[:, :tokens]


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
    print(f"{form}, {FORMS[form]}", flush=True)
    print(f"{'tokens':>8}{'forward':>10}{'backward':>10}{'dense forward':>15}{'dense backward':>16}   ms")
    for tokens in (4096, 8192, 16384, 32768, 65536):
        inputs, indices = inputs_of(form, tokens), chosen_indices(tokens, CHOSEN)
        ours, dense = kernel_times(inputs, indices, rounds), dense_times(inputs, indices, rounds)
        theirs = [f"{time:.1f}" for time in dense] or ["-", "-"]
        print(f"{tokens:8}{ours[0]:10.1f}{ours[1]:10.1f}{theirs[0]:>15}{theirs[1]:>16}", flush=True)


def main() -> None:
    """Measures every form."""
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
