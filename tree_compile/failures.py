"""Errors of the model's own code while it runs, said in terms of the sequences."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

from tree_compile.errors import CaptureError, TokenRangeError, TreeCompileError
from tree_compile.passes.source import line_of_trace
from tree_compile.per_sequence import numbers_of
from tree_compile.runtime.row import Row

_OUTSIDE = ("index out of range in self", "out of bounds for dimension", "index out of bounds")
"""What torch says of a number that a table has no entry for: an embedding, an index, and compiled code."""


@contextlib.contextmanager
def of_the_model_alone() -> Iterator[None]:
    """A model that fails on one sequence has nothing to be compared with.

    Raises:
        CaptureError: names the line at which it fails.
    """
    try:
        yield
    except TreeCompileError:
        raise
    except Exception as error:
        first_line, *_ = [*str(error).strip().splitlines(), ""]
        raise CaptureError(
            f"The model itself, unpacked, fails on one sequence: {type(error).__name__}: {first_line}",
            where=line_of_trace("".join(traceback.format_tb(error.__traceback__))),
            why="its outputs are what those of the tree model are compared with.",
            hint="make model(ids) work first, in the same dtype and on the same device; "
            "self_check=False leaves the comparison out.",
        ) from error


@contextlib.contextmanager
def of_tables(row: Row) -> Iterator[None]:
    """A number that one of the model's tables has no entry for, such as a payload, is one of the sequences' own.

    Raises:
        TokenRangeError: names the sequences of the row.
    """
    try:
        yield
    except Exception as error:
        if not any(words in str(cause) for cause in _causes(error) for words in _OUTSIDE):
            raise
        raise TokenRangeError(
            f"A table of the model has no entry for a number in the row of sequences {numbers_of(row.sequence_ids)}.",
            why="a token id or a payload, or what the model makes of it, is not below the table's length.",
            hint="look for the largest token ids and payloads; with row_tokens, a row has fewer sequences.",
        ) from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Compiled code may fail once more while it tells of the error."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
