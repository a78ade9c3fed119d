"""A file of sequences -> its plan, and the numbers of that plan: what `treecompile pack` shows."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tree_compile.errors import InputError
from tree_compile.rollouts import Tokenizer, read_rollouts
from tree_compile.runtime.plan import Plan
from tree_compile.runtime.planning import plan_rows, warm_up

__all__ = ["PackReport", "check_output", "pack_file"]


@dataclass(frozen=True)
class PackReport:
    """A plan, and how long it took.

    Attributes:
        plan: the plan.
        seconds: the time of planning, without reading the file and without loading what is compiled.
        min_shared_tokens: shared prefixes shorter than this were planned for each sequence.
    """

    plan: Plan
    seconds: float
    min_shared_tokens: int

    @property
    def holes(self) -> int:
        """Tokens for which the rows still have room."""
        return len(self.plan.rows) * (self.plan.row_tokens or self.plan.packed_tokens) - self.plan.packed_tokens

    def numbers(self) -> dict[str, Any]:
        """The numbers of the plan and of every row, as JSON can hold them."""
        plan = self.plan
        return {
            "sequences": plan.sequences,
            "input_tokens": plan.input_tokens,
            "packed_tokens": plan.packed_tokens,
            "saved_tokens": plan.input_tokens - plan.packed_tokens,
            "token_bound": plan.token_bound,
            "min_shared_tokens": self.min_shared_tokens,
            "row_tokens": plan.row_tokens,
            "row_count": len(plan.rows),
            "row_bound": plan.row_bound,
            "holes": self.holes,
            "plan_milliseconds": round(self.seconds * 1000, 3),
            "rows": [{"tokens": row.length, "sequence_ids": list(row.sequence_ids)} for row in plan.rows],
        }

    def __str__(self) -> str:
        plan = self.plan
        saved = plan.input_tokens - plan.packed_tokens
        lines = [
            f"rows             {len(plan.rows):,} (at least {plan.row_bound:,})",
            f"tokens in        {plan.input_tokens:,}",
            f"tokens computed  {plan.packed_tokens:,} (at least {plan.token_bound:,})",
            f"tokens saved     {saved:,} ({saved / plan.input_tokens:.1%})",
            f"not shared       prefixes of fewer than {self.min_shared_tokens:,} tokens (--min-shared-tokens)",
            f"holes            {self.holes:,} tokens",
            f"planned in       {self.seconds * 1000:.1f} ms",
        ]
        return "\n".join([*lines, "", plan.render()])


def check_output(path: Path) -> None:
    """Refuses a file that cannot be written; to be asked before planning, which takes long.

    Raises:
        InputError: it is a folder, is in none, or may not be written.
    """
    if path.is_dir():
        why = "it is a folder."
    elif not path.parent.is_dir():
        why = f"there is no folder {path.parent}."
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "it may not be written."
    else:
        return
    raise InputError(f"{path} cannot be written.", why=why, hint="give the path of a file in a folder that is there.")


def pack_file(path: Path, tokenizer: Tokenizer, min_shared_tokens: int, **options: Any) -> PackReport:
    """Plans the rows of a file.

    Args:
        path: a file that `read_rollouts` reads.
        tokenizer: what turns messages into ids.
        min_shared_tokens: shared prefixes shorter than this are planned for each sequence.
        options: the others of `plan_rows`.

    Raises:
        InputError: the file is wrong, or a sequence is longer than a row.
    """
    sequences = [rollout.tokens for rollout in read_rollouts(path, tokenizer)]
    warm_up()
    start = time.perf_counter()
    plan = plan_rows(sequences, min_shared_tokens=min_shared_tokens, **options)
    return PackReport(plan, time.perf_counter() - start, min_shared_tokens)
