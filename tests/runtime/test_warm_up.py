"""What numba has compiled, and when."""

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

from tree_compile.runtime import bounds, layout, reopening, trie
from tree_compile.runtime import constructions as constructing
from tree_compile.runtime import leaves as leaves_module
from tree_compile.runtime.planning import plan_rows, warm_up


def unaligned(tokens):
    room = np.empty(tokens.nbytes + 1, np.uint8)
    found = room[1:].view(tokens.dtype)
    found[:] = tokens
    return found


KINDS = {
    "int64": lambda tokens: tokens,
    "int32": lambda tokens: tokens.astype(np.int32),
    "uint16": lambda tokens: tokens.astype(np.uint16),
    "big_endian": lambda tokens: tokens.astype(">i4"),
    "read_only": lambda tokens: np.frombuffer(tokens.tobytes(), tokens.dtype),
    "unaligned": unaligned,
    "every_second": lambda tokens: np.repeat(tokens, 2)[::2],
}


@pytest.fixture(scope="module")
def kernels():
    """Everything that numba has compiled, each with the number of types that it was compiled for."""
    warm_up()
    modules = (bounds, constructing, layout, leaves_module, reopening, trie)
    found = {k for module in modules for k in vars(module).values() if isinstance(k, Dispatcher)}
    assert len(trie._order.signatures) == len(trie._first_difference.signatures) == 2
    return {kernel: len(kernel.signatures) for kernel in found}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("row_tokens", [170, np.int32(170), np.uint64(170), 2**63, 2**70])
def test_warm_up_leaves_nothing_to_compile(kernels, kind, row_tokens):
    random = np.random.default_rng(0)
    plain = [np.append(np.full(30, g), random.integers(0, 99, 20 + g)) for g in range(9) for _ in range(9)]
    sequences = [kind(tokens) for tokens in plain]
    plan = plan_rows(sequences, row_tokens).with_sequences(sequences)
    assert type(plan.row_tokens) is int
    alone = plan.of_row(0)
    alone.with_sequences([sequences[i] for i in plan.rows[0].sequence_ids])
    assert {kernel: len(kernel.signatures) for kernel in kernels} == kernels
