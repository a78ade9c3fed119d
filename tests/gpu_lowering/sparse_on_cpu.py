"""Sparse index attention by its kernels' programs, computed tile by tile on the CPU, and by one dense masked softmax.

Prints one JSON object: for every case the greatest relative difference of the outputs, logarithms and gradients.
"""

import json
from functools import partial

import torch
from tile_interpreter import run_program

from tree_compile.runtime import sparse_kernels

CASES = {
    # heads, key heads, width, value width, tokens, keys, indices
    "indices that end within a block": (16, 1, 64, 64, 5, 90, 70),
    "groups of heads": (128, 1, 32, 32, 3, 90, 64),
    "padded heads": (20, 1, 64, 32, 4, 30, 9),
    "key heads": (32, 2, 96, 64, 4, 70, 65),
    "one index": (16, 1, 32, 32, 6, 10, 1),
    "no index": (16, 1, 32, 32, 3, 10, 0),
    "latent attention": (128, 1, 576, 512, 3, 80, 67),
    "scores whose exponentials are 0": (16, 1, 64, 64, 5, 90, 70),
}
NAMES = ("out", "lse", "query", "key", "value")


def chosen_indices(tokens, keys, count):
    """int32 [1, T, K]: some keys for each query; none for the first, only the last for the second, all for the last."""
    indices = torch.stack([torch.randperm(keys)[:count] for _ in range(tokens)])
    is_chosen = torch.rand(tokens, count) < 0.6
    is_chosen[:2], is_chosen[1, -1:], is_chosen[-1] = False, True, True
    return indices.where(is_chosen, -1).to(torch.int32)[None]


def inputs_of(case, dtype):
    """Query, key, value and indices; rows that no query names are nan, so that reading one shows."""
    heads, key_heads, width, value_width, tokens, keys, count = CASES[case]
    query = torch.randn(1, heads, tokens, width).to(dtype)
    key, value = (torch.randn(1, key_heads, keys, size).to(dtype) for size in (width, value_width))
    indices = chosen_indices(tokens, keys, count)
    if case == "scores whose exponentials are 0":
        query[..., 0], key[..., 0] = -40.0, 40.0
    is_named = torch.isin(torch.arange(keys), indices)
    key, value = (tensor.masked_fill(~is_named[:, None], float("nan")) for tensor in (key, value))
    return query, key, value, indices


def dense_attention(query, key, value, indices, scale):
    """The definition, with one dense [T, N] score matrix, of `sparse_kernels.forward`; no key may be named twice."""
    group = query.shape[1] // key.shape[1]
    scores = scale * query @ key.repeat_interleave(group, 1).mT
    named = torch.zeros(indices.shape[1], key.shape[2] + 1, dtype=torch.bool, device=query.device)
    # What names nothing goes into a last column of its own.
    named.scatter_(1, indices[0].long().where(indices[0] >= 0, key.shape[2]), value=True)
    scores = scores.masked_fill(~named[:, :-1], float("-inf"))
    names_none = ~named[:, :-1].any(1)[:, None]
    weights = scores.masked_fill(names_none, 0.0).softmax(-1).masked_fill(names_none, 0.0)
    return weights @ value.repeat_interleave(group, 1), scores.logsumexp(-1)


def by_kernels(query, key, value, indices, scale, grad):
    out, lse = sparse_kernels.forward(query, key, value, indices, scale)
    return out, lse, *sparse_kernels.backward(grad, query, key, value, indices, scale, out, lse)


def by_definition(query, key, value, indices, scale, grad):
    leaves = [tensor.nan_to_num().float().requires_grad_() for tensor in (query, key, value)]
    out, lse = dense_attention(*leaves, indices, scale)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad.float())


def difference(found, expected):
    """Relative to the greatest number, unless all are small; what is infinite must be so in both."""
    is_finite = expected.isfinite()
    assert torch.equal(found.where(~is_finite, 0), expected.where(~is_finite, 0))
    found, expected = (tensor.where(is_finite, 0).float() for tensor in (found, expected))
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1))


def differences(case, dtype):
    query, key, value, indices = inputs_of(case, dtype)
    grad = torch.randn(*query.shape[:3], value.shape[3]).to(dtype)
    arguments = (query, key, value, indices, query.shape[3] ** -0.5, grad)
    both = zip(NAMES, by_kernels(*arguments), by_definition(*arguments), strict=True)
    return {name: difference(found, expected) for name, found, expected in both}


def main():
    torch.manual_seed(0)
    sparse_kernels._compiled = lambda program: partial(run_program, program)
    # The kernels take half precision only; their arithmetic is checked in float32, where rounding hides less.
    sparse_kernels._DTYPES[torch.float32] = "float32"
    dtypes = {"float32": list(CASES), "float16": ["latent attention"], "bfloat16": ["latent attention", "key heads"]}
    found = {name: {case: differences(case, getattr(torch, name)) for case in cases} for name, cases in dtypes.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
