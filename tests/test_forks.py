"""Processes that are forked while threads of this one work, as those of a DataLoader are."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from tree_compile import plan_rows
from tree_compile.patches import _CHANGING
from tree_compile.pipeline import CAPTURING

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 500
"""A machine that has no compiled planner yet compiles it first."""
FORKS = """
import multiprocessing, os, sys, time
from torch import nn
from tree_compile import plan_rows, treecompile

def rows():
    return len(plan_rows([[1, 2, 3], [1, 2, 4]], 8).rows)

if __name__ == "__main__":
    treecompile(nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8)), backend="eager")
    time.sleep(float(sys.argv[1]))
    with multiprocessing.get_context("fork").Pool(1) as pool:
        print(pool.apply_async(rows).get(timeout=400), "row")
"""


@pytest.mark.parametrize("wait", [0.0, 0.05, 0.3])
def test_worker_that_is_forked_right_after_treecompile_plans(wait):
    """In a fresh interpreter, where the planner is not loaded yet."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(wait)], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.stdout == "1 row\n", done.stderr


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_rows_of_a_worker_have_the_tokens_of_their_sequences(start):
    """A worker moves tensors into shared memory while it sends them, before or after the rows."""
    sequences = [torch.tensor([*range(40), end]) for end in range(16)]
    rows_are_first = []
    for batch in DataLoader(sequences, 4, num_workers=1, collate_fn=_with_rows, multiprocessing_context=start):
        rows_are_first.append(isinstance(batch[0], tuple))
        tensors, (row,) = reversed(batch) if rows_are_first[-1] else batch
        ends = [int(tensor[-1]) for tensor in tensors]
        assert row.tokens.tolist() == [*range(40), *ends]
    assert rows_are_first == [True, False, True, False]


def _with_rows(sequences):
    """The rows first in every other batch."""
    rows = plan_rows(sequences, min_shared_tokens=1).rows
    return (sequences, rows) if int(sequences[0][-1]) % 8 else (rows, sequences)


@pytest.mark.parametrize("lock", [CAPTURING, _CHANGING], ids=["CAPTURING", "_CHANGING"])
def test_fork_waits_for_the_thread_that_changes_what_is_global(lock):
    taken, leave, forked = threading.Event(), threading.Event(), threading.Event()

    def hold():
        with lock:
            taken.set()
            leave.wait()

    def fork():
        if (child := os.fork()) == 0:
            os._exit(0 if lock.acquire(blocking=False) else 1)
        forked.set()
        found.append(os.waitpid(child, 0)[1])

    found = []
    threads = [threading.Thread(target=hold), threading.Thread(target=fork)]
    threads[0].start()
    taken.wait()
    threads[1].start()
    assert not forked.wait(0.3)
    leave.set()
    for thread in threads:
        thread.join(SECONDS)
    assert found == [0]


def test_thread_that_captures_may_fork():
    with CAPTURING:
        if (child := os.fork()) == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
