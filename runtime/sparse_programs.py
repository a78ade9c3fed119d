"""Attention over chosen keys as TileLang programs, for one key-value head that all query heads share.

One block of threads computes one query for one group of heads. It goes over the query's indices in blocks, and gathers
the keys and values of a block into shared memory while it computes with those before it. TileLang guards the gather
with the bounds of the tensor: an index of -1 reads nothing and gives zeros. Its score is -inf and its weight 0.

Imported where a kernel is made, since tilelang is optional. Dimensions that differ from row to row are dynamic.
"""

import math
from typing import Any

import tilelang.language as T

from tree_compile.runtime.sparse_shapes import SparseShape, gradient_part

__all__ = ["backward_program", "forward_program"]

_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2)
# Every group of warps has all heads of a block and some of the columns.
_BY_COLUMNS = T.GemmWarpPolicy.FullCol
# Two stages would hide more latency, but TileLang compiles them for a number of steps that is known beforehand only.
_STAGES = 1
# Columns of the output that are multiplied at once for `row_delta`.
_DELTA_PART = 32


@T.macro
def _gather(source, chosen, token, step, rows, columns, target):
    for i, j in T.Parallel(rows, columns):
        target[i, j] = source[chosen[token, step, i], j]


@T.macro
def _scatter_add(values, chosen, token, step, rows, first, columns, target):
    for i, j in T.Parallel(rows, columns):
        if chosen[token, step, i] >= 0:
            T.atomic_add(target[chosen[token, step, i], first + j], values[i, j])


def forward_program(shape: SparseShape) -> Any:
    """Softmax of the scores of the chosen keys, times their values.

    The program's arguments: query [T, H, D], key [N, D], value [N, E], indices int32 [T, S, block] with -1 for nothing,
    scale; it writes out [T, H, E] and lse float32 [T, H]. A query that chose nothing has output 0 and lse -inf.
    """
    heads, rows, block, width, value_width = shape.heads, shape.rows, shape.block, shape.width, shape.value_width
    groups, dtype = heads // rows, shape.dtype
    tokens, keys, steps = T.dynamic("tokens"), T.dynamic("keys"), T.dynamic("steps")

    @T.prim_func
    def sparse_forward(
        query: T.Tensor((tokens, heads, width), dtype),
        key: T.Tensor((keys, width), dtype),
        value: T.Tensor((keys, value_width), dtype),
        indices: T.Tensor((tokens, steps, block), "int32"),
        scale: T.float32,
        out: T.Tensor((tokens, heads, value_width), dtype),
        lse: T.Tensor((tokens, heads), "float32"),
    ):
        with T.Kernel(tokens * groups, threads=shape.threads) as place:
            query_rows = T.alloc_shared((rows, width), dtype)
            key_rows = T.alloc_shared((block, width), dtype)
            value_rows = T.alloc_shared((block, value_width), dtype)
            weights = T.alloc_shared((rows, block), dtype)
            scores = T.alloc_fragment((rows, block), "float32")
            result = T.alloc_fragment((rows, value_width), "float32")
            row_max = T.alloc_fragment((rows,), "float32")
            max_before = T.alloc_fragment((rows,), "float32")
            shrink = T.alloc_fragment((rows,), "float32")
            block_sum = T.alloc_fragment((rows,), "float32")
            row_sum = T.alloc_fragment((rows,), "float32")
            token, head = place // groups, place % groups * rows

            T.copy(query[token, head : head + rows, 0:width], query_rows)
            T.fill(result, 0)
            T.fill(row_sum, 0)
            T.fill(row_max, -T.infinity("float32"))
            for step in T.Pipelined(steps, num_stages=_STAGES):
                _gather(key, indices, token, step, block, width, key_rows)
                _gather(value, indices, token, step, block, value_width, value_rows)
                T.gemm(query_rows, key_rows, scores, transpose_B=True, policy=_BY_COLUMNS, clear_accum=True)
                for i, j in T.Parallel(rows, block):
                    scores[i, j] = T.if_then_else(
                        indices[token, step, j] >= 0, scores[i, j] * (scale * _LOG2_E), -T.infinity("float32")
                    )
                T.copy(row_max, max_before)
                T.reduce_max(scores, row_max, dim=1, clear=False)
                # As long as nothing is chosen the maximum is -inf, and -inf minus -inf is nan.
                for i in T.Parallel(rows):
                    shrink[i] = T.if_then_else(
                        row_max[i] > -T.infinity("float32"), T.exp2(max_before[i] - row_max[i]), 1.0
                    )
                for i, j in T.Parallel(rows, block):
                    scores[i, j] = T.if_then_else(indices[token, step, j] >= 0, T.exp2(scores[i, j] - row_max[i]), 0.0)
                T.reduce_sum(scores, block_sum, dim=1)
                for i in T.Parallel(rows):
                    row_sum[i] = row_sum[i] * shrink[i] + block_sum[i]
                for i, j in T.Parallel(rows, value_width):
                    result[i, j] *= shrink[i]
                T.copy(scores, weights)
                T.gemm(weights, value_rows, result, policy=_BY_COLUMNS)

            for i, j in T.Parallel(rows, value_width):
                result[i, j] = T.if_then_else(row_sum[i] > 0, result[i, j] / row_sum[i], 0.0)
            T.copy(result, out[token, head : head + rows, 0:value_width])
            for i in T.Parallel(rows):
                lse[token, head + i] = (row_max[i] + T.log2(row_sum[i])) * _LN_2

    return sparse_forward


def backward_program(shape: SparseShape) -> Any:
    """Gradients of query, key and value from that of the output.

    The program's arguments: grad [T, H, E], query [T, H, D], key [N, D], value [N, E], indices int32 [T, S, block],
    scale, out [T, H, E] and lse float32 [T, H] as the forward program wrote them; it writes query_grad [T, H, D] and
    adds to key_grad float32 [N, D] and value_grad float32 [N, E].
    """
    heads, rows, block, width, value_width = shape.heads, shape.rows, shape.block, shape.width, shape.value_width
    groups, dtype = heads // rows, shape.dtype
    width_part, value_part = gradient_part(width), gradient_part(value_width)
    tokens, keys, steps = T.dynamic("tokens"), T.dynamic("keys"), T.dynamic("steps")

    @T.prim_func
    def sparse_backward(
        grad: T.Tensor((tokens, heads, value_width), dtype),
        query: T.Tensor((tokens, heads, width), dtype),
        key: T.Tensor((keys, width), dtype),
        value: T.Tensor((keys, value_width), dtype),
        indices: T.Tensor((tokens, steps, block), "int32"),
        scale: T.float32,
        out: T.Tensor((tokens, heads, value_width), dtype),
        lse: T.Tensor((tokens, heads), "float32"),
        query_grad: T.Tensor((tokens, heads, width), dtype),
        key_grad: T.Tensor((keys, width), "float32"),
        value_grad: T.Tensor((keys, value_width), "float32"),
    ):
        with T.Kernel(tokens * groups, threads=shape.threads) as place:
            query_rows = T.alloc_shared((rows, width), dtype)
            grad_rows = T.alloc_shared((rows, value_width), dtype)
            key_rows = T.alloc_shared((block, width), dtype)
            value_rows = T.alloc_shared((block, value_width), dtype)
            weights = T.alloc_shared((rows, block), dtype)
            score_grads = T.alloc_shared((rows, block), dtype)
            # In shared memory: the layout that sums it up is not the one that needs it.
            row_delta = T.alloc_shared((rows,), "float32")
            delta_part = T.alloc_fragment((rows, _DELTA_PART), "float32")
            delta = T.alloc_fragment((rows,), "float32")
            row_lse = T.alloc_fragment((rows,), "float32")
            scores = T.alloc_fragment((rows, block), "float32")
            changes = T.alloc_fragment((rows, block), "float32")
            query_sum = T.alloc_fragment((rows, width), "float32")
            key_sum = T.alloc_fragment((block, width_part), "float32")
            value_sum = T.alloc_fragment((block, value_part), "float32")
            token, head = place // groups, place % groups * rows

            T.copy(query[token, head : head + rows, 0:width], query_rows)
            T.copy(grad[token, head : head + rows, 0:value_width], grad_rows)
            T.fill(query_sum, 0)
            T.fill(delta, 0)
            for part in T.serial(value_width // _DELTA_PART):
                for i, j in T.Parallel(rows, _DELTA_PART):
                    delta_part[i, j] = T.cast(out[token, head + i, part * _DELTA_PART + j], "float32") * T.cast(
                        grad[token, head + i, part * _DELTA_PART + j], "float32"
                    )
                T.reduce_sum(delta_part, delta, dim=1, clear=False)
            T.copy(delta, row_delta)
            for i in T.Parallel(rows):
                row_lse[i] = lse[token, head + i] * _LOG2_E
            for step in T.Pipelined(steps, num_stages=_STAGES):
                _gather(key, indices, token, step, block, width, key_rows)
                _gather(value, indices, token, step, block, value_width, value_rows)
                T.gemm(query_rows, key_rows, scores, transpose_B=True, policy=_BY_COLUMNS, clear_accum=True)
                for i, j in T.Parallel(rows, block):
                    scores[i, j] = T.if_then_else(
                        indices[token, step, j] >= 0, T.exp2(scores[i, j] * (scale * _LOG2_E) - row_lse[i]), 0.0
                    )
                T.copy(scores, weights)
                T.gemm(grad_rows, value_rows, changes, transpose_B=True, policy=_BY_COLUMNS, clear_accum=True)
                for i, j in T.Parallel(rows, block):
                    changes[i, j] = scores[i, j] * (changes[i, j] - row_delta[i]) * scale
                T.copy(changes, score_grads)
                T.gemm(score_grads, key_rows, query_sum, policy=_BY_COLUMNS)
                for part in T.unroll(value_width // value_part):
                    first = part * value_part
                    T.gemm(
                        weights, grad_rows[:, first : first + value_part], value_sum,
                        transpose_A=True, policy=_BY_COLUMNS, clear_accum=True,
                    )  # fmt: skip
                    _scatter_add(value_sum, indices, token, step, block, first, value_part, value_grad)
                for part in T.unroll(width // width_part):
                    first = part * width_part
                    T.gemm(
                        score_grads, query_rows[:, first : first + width_part], key_sum,
                        transpose_A=True, policy=_BY_COLUMNS, clear_accum=True,
                    )  # fmt: skip
                    _scatter_add(key_sum, indices, token, step, block, first, width_part, key_grad)

            T.copy(query_sum, query_grad[token, head : head + rows, 0:width])

    return sparse_backward
