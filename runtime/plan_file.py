"""A plan as a file: its tree and which leaves share a row. All else follows from these, and is made anew."""

from __future__ import annotations

import zipfile
import zlib
from os import PathLike

import numpy as np

from tree_compile.errors import PlanError
from tree_compile.runtime.sequences import IntArray
from tree_compile.runtime.tree import PrefixTree, tree_of_segments

__all__ = ["read_plan", "write_plan"]

_FORMAT = 2
_ARRAYS = ("length", "parent", "source", "sequence_segment", "sequence_length", "leaf_row")
_BROKEN_FILE = (
    KeyError, ValueError, TypeError, AttributeError, EOFError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def write_plan(path: str | PathLike[str], tree: PrefixTree, leaf_row: IntArray, numbers: list[int]) -> None:
    """Writes an npz file of integers.

    Args:
        path: the file.
        tree: the prefix tree.
        leaf_row: for each leaf of the tree its row, int64 [leaves].
        numbers: row_tokens or 0, padded, row_bound and token_bound.
    """
    arrays = {name: getattr(tree, name) for name in _ARRAYS[:-1]} | {"leaf_row": leaf_row}
    with open(path, "wb") as file:
        np.savez_compressed(file, numbers=np.array([_FORMAT, *numbers], np.int64), **arrays)


def read_plan(path: str | PathLike[str]) -> tuple[PrefixTree, IntArray, list[int]]:
    """Reads what `write_plan` wrote. Nothing in the file is run, and every index in it is checked.

    Raises:
        PlanError: the file is not a plan, one of another version, or no plan could have its numbers.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            version, *numbers = _integers(file["numbers"], "numbers").tolist()
            if version != _FORMAT:
                raise PlanError(
                    f"{path} is a plan of version {version}, not {_FORMAT}.", hint="plan the sequences anew."
                )
            row_tokens, padded, row_bound, token_bound = numbers
            arrays = {name: _integers(file[name], name) for name in _ARRAYS}
        leaf_row = arrays.pop("leaf_row")
        tree = tree_of_segments(**arrays)
        _check_rows(leaf_row, len(tree.leaves))
    except (PlanError, FileNotFoundError, IsADirectoryError, PermissionError):
        raise
    except _BROKEN_FILE as error:
        raise PlanError(f"{path} is not a plan.", why=str(error), hint="write it with plan.save(path).") from error
    return tree, leaf_row, [row_tokens, padded, row_bound, token_bound]


def _integers(values: np.ndarray, name: str) -> IntArray:
    if values.dtype != np.int64 or values.ndim != 1 or not len(values):
        raise ValueError(f"{name} is not a list of 64-bit integers")
    return values


def _check_rows(leaf_row: IntArray, leaves: int) -> None:
    rows = np.unique(leaf_row)
    if len(leaf_row) != leaves or not np.array_equal(rows, np.arange(len(rows))):
        raise ValueError("the leaves are not in rows that count from 0")
