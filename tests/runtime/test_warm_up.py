"""What numba has compiled, and when."""

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
from numba.core.dispatcher import Dispatcher

from tree_compile.runtime import bounds, layout, reopening, trie
from tree_compile.runtime import constructions as constructing
from tree_compile.runtime import leaves as leaves_module
from tree_compile.runtime.planning import plan_rows, warm_up

ROOT = Path(__file__).resolve().parents[2]


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
ROW_TOKENS = [170, np.int32(170), np.uint64(170), 2**63, 2**70]


def signatures():
    """The types that every kernel of the planner has been compiled for."""
    modules = (bounds, constructing, layout, leaves_module, reopening, trie)
    found = {k for module in modules for k in vars(module).values() if isinstance(k, Dispatcher)}
    return {(kernel.__name__, signature) for kernel in found for signature in kernel.signatures}


def plan(kind, row_tokens):
    random = np.random.default_rng(0)
    plain = [np.append(np.full(30, g), random.integers(0, 99, 20 + g)) for g in range(9) for _ in range(9)]
    sequences = [kind(tokens) for tokens in plain]
    found = plan_rows(sequences, row_tokens).with_sequences(sequences)
    assert type(found.row_tokens) is int
    found.of_row(0).with_sequences([sequences[i] for i in found.rows[0].sequence_ids])


def compiled_after_warm_up():
    """What plans of all kinds still compile, by kind."""
    warm_up()
    assert len(trie._order.signatures) == len(trie._first_other_sequence.signatures) == 2
    before, found = signatures(), {}
    for name, row_tokens in itertools.product(KINDS, ROW_TOKENS):
        plan(KINDS[name], row_tokens)
        if signatures() != before:
            found[name, row_tokens], before = signatures() - before, signatures()
    return found


def test_warm_up_leaves_nothing_to_compile():
    """In a fresh interpreter: other tests have compiled what they use."""
    code = f"import {__name__} as own; print(own.compiled_after_warm_up())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{}"
