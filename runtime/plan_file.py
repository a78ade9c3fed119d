"""A plan as a file: its tree and which leaves share a row. All else follows from these, and is made anew."""

from __future__ import annotations

import zipfile
import zlib
from os import PathLike
from typing import NamedTuple

import numpy as np

from tree_compile.errors import PlanError
from tree_compile.runtime.sequences import IntArray
from tree_compile.runtime.tree import PrefixTree, parents_in_pre_order

__all__ = ["Numbers", "not_a_plan", "read_plan", "write_plan"]

_FORMAT = 2
_ARRAYS = ("length", "parent", "source", "sequence_segment", "sequence_length", "leaf_row")
_BROKEN_FILE = (
    KeyError, ValueError, TypeError, AttributeError, EOFError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


class Numbers(NamedTuple):
    """What is said of a plan beside its arrays, as in `Plan`; `row_tokens` is 0 where there is no limit."""

    row_tokens: int
    padded: int
    row_bound: int
    token_bound: int


def write_plan(path: str | PathLike[str], tree: PrefixTree, leaf_row: IntArray, numbers: Numbers) -> None:
    """Writes an npz file of integers.

    Args:
        path: the file.
        tree: the prefix tree.
        leaf_row: for each leaf of the tree its row, int64 [leaves].
        numbers: of the plan.
    """
    arrays = {name: getattr(tree, name) for name in _ARRAYS[:-1]} | {"leaf_row": leaf_row}
    with open(path, "wb") as file:
        np.savez_compressed(file, numbers=np.array([_FORMAT, *numbers], np.int64), **arrays)


def read_plan(path: str | PathLike[str]) -> tuple[PrefixTree, IntArray, Numbers]:
    """Reads what `write_plan` wrote. Nothing in the file is run, and every index in it is checked.

    Raises:
        PlanError: the file is not a plan, one of another version, or no plan could have its numbers.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            version, *numbers = _integers(file["numbers"], "numbers").tolist()
            if version != _FORMAT:
                raise _other_version(path, version)
            found = Numbers(*numbers)
            arrays = {name: _integers(file[name], name) for name in _ARRAYS}
        leaf_row = arrays.pop("leaf_row")
        tree = _tree_of_segments(**arrays)
        _check_rows(leaf_row, len(tree.leaves))
    except (PlanError, FileNotFoundError, IsADirectoryError, PermissionError):
        raise
    except _BROKEN_FILE as error:
        # What numpy says of other files is about pickles, which are never read here.
        is_own = isinstance(error, ValueError) and "allow_pickle" not in str(error)
        raise not_a_plan(path, f"{error}." if is_own else "it is no npz file of integers.") from error
    return tree, leaf_row, found


def not_a_plan(path: str | PathLike[str], why: str) -> PlanError:
    """The error for a file that is read as a plan and is none."""
    return PlanError(f"{path} is not a plan.", why=why, hint="write it with plan.save(path).")


def _other_version(path: str | PathLike[str], version: int) -> PlanError:
    return PlanError(
        f"{path} is a plan of version {version}, not {_FORMAT}.",
        why="each version holds other numbers.",
        hint="plan the sequences anew.",
    )


def _integers(values: np.ndarray, name: str) -> IntArray:
    if values.dtype != np.int64 or values.ndim != 1 or not len(values):
        raise ValueError(f"{name} is not a list of 64-bit integers")
    return values


def _check_rows(leaf_row: IntArray, leaves: int) -> None:
    rows = np.unique(leaf_row)
    if len(leaf_row) != leaves or not np.array_equal(rows, np.arange(len(rows))):
        raise ValueError("the leaves are not in rows that count from 0")


def _tree_of_segments(
    length: IntArray, parent: IntArray, source: IntArray, sequence_segment: IntArray, sequence_length: IntArray
) -> PrefixTree:
    """The tree of segments that come from outside, with every index checked. Arguments as in `PrefixTree`.

    Raises:
        ValueError: the segments are not a tree in pre-order, or a sequence does not end where it is said to.
    """
    if not len(length) == len(parent) == len(source) or len(sequence_segment) != len(sequence_length):
        raise ValueError("the arrays of the tree differ in length")
    # Sums of Python integers, which do not overflow.
    tokens, input_tokens = sum(length.tolist()), sum(sequence_length.tolist())
    if length.min() < 1 or not tokens <= input_tokens <= np.iinfo(np.int64).max:
        raise ValueError("a segment has no tokens, or there are more tokens than in all sequences")
    subtree_end, start = _subtree_ends(parent), _starts(length, parent)
    tree = PrefixTree(start, length, parent, subtree_end, source, sequence_segment, sequence_length)
    _check_sequences(tree)
    return tree


def _subtree_ends(parent: IntArray) -> IntArray:
    """One past the last segment below each.

    Raises:
        ValueError: the segments are not in pre-order.
    """
    above, past = parent.tolist(), list(range(1, len(parent) + 1))
    for segment in range(len(parent) - 1, -1, -1):
        if not -1 <= above[segment] < segment:
            raise ValueError("a segment does not come after the one above it")
        if above[segment] >= 0:
            past[above[segment]] = max(past[above[segment]], past[segment])
    if not np.array_equal(parents_in_pre_order(past), parent):
        raise ValueError("the segments are not in pre-order")
    return np.array(past, np.int64)


def _starts(length: IntArray, parent: IntArray) -> IntArray:
    start, tokens = [0] * len(length), length.tolist()
    for segment, above in enumerate(parent.tolist()):
        if above >= 0:
            start[segment] = start[above] + tokens[above]
    return np.array(start, np.int64)


def _check_sequences(tree: PrefixTree) -> None:
    segment, source = tree.sequence_segment, tree.source
    if not (_are_indices(segment, len(tree)) and _are_indices(source, len(segment))):
        raise ValueError("a sequence or a segment is named that is not there")
    ends = tree.sequence_length
    if ((ends <= tree.start[segment]) | (ends > tree.end[segment])).any():
        raise ValueError("a sequence does not end in its segment")
    index = np.arange(len(tree))
    if ((segment[source] < index) | (segment[source] >= tree.subtree_end) | (ends[source] < tree.end)).any():
        raise ValueError("a segment is not on the path of the sequence that should hold its tokens")


def _are_indices(values: IntArray, size: int) -> bool:
    return bool(values.min() >= 0 and values.max() < size)
