"""Batches that the workers of a DataLoader plan, so that the training process waits for none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tree_compile.errors import PayloadError
from tree_compile.runtime.counts import a_kind
from tree_compile.runtime.options import MIN_SHARED_TOKENS, PLAN_SECONDS, check_options
from tree_compile.runtime.plan import Plan
from tree_compile.runtime.planning import plan_rows
from tree_compile.runtime.samples import Sample, is_mask_name
from tree_compile.runtime.sequences import TOKENS, TokenSequence, as_array

__all__ = ["Collate", "Element", "PlannedBatch", "treecompile_collate"]

Element: TypeAlias = "Sample | TokenSequence | Mapping[str, Any] | Sequence[Sample | Mapping[str, Any]]"

TRAINABLE = "trainable"
LABELS = "labels"
IGNORED_LABEL = -100


class PlannedBatch(Plan):
    """A plan whose rows take their sequences and samples along when it is sent to another process."""

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"rows": self.rows}


@dataclass(frozen=True)
class Collate:
    """Elements of a dataset -> a planned batch. Made by `treecompile_collate`, which says what elements are.

    Attributes:
        plan_options: keyword arguments of `plan_rows`.
        trainable: the column that says of each token whether it is trained on.
    """

    plan_options: Mapping[str, Any]
    trainable: str

    def __call__(self, elements: Sequence[Element]) -> PlannedBatch:
        """Plans a batch.

        Raises:
            InputError: a sample is not usable, or does not say what is trained on where others do; it is named by its
                number in the batch.
        """
        given = list(_one_by_one(elements))
        samples = [_sample(element, number, self.trainable) for number, element in enumerate(given)]
        _check_all_marked(given, samples)
        plan = plan_rows(samples, **self.plan_options)
        return PlannedBatch(**{field.name: getattr(plan, field.name) for field in fields(plan)})


def treecompile_collate(
    row_tokens: int | None = None,
    min_shared_tokens: int = MIN_SHARED_TOKENS,
    objective: str = "rows",
    pad_rows: bool = False,
    *,
    share: str = "all",
    trainable: str = TRAINABLE,
    plan_seconds: float = PLAN_SECONDS,
    plan_attempts: int | None = None,
) -> Collate:
    """Makes the `collate_fn` of a `torch.utils.data.DataLoader`: it plans the rows of each batch, in a worker if any.

        loader = DataLoader(samples, batch_size=64, num_workers=2, collate_fn=treecompile_collate(row_tokens=32_768))
        for planned in loader:
            for out in tree_model.rows(planned):
                losses.sft(out, normaliser="per_token").backward()

    What it gives is a `Plan` of samples: `tree_model(planned)`, `planned.packed_tokens` and the like work, after it was
    sent by a worker, too. Its rows are computed as they are, so these options hold, and not those of `treecompile`.

    An element of the dataset is a `Sample`; or tokens alone, [len], all trained on; or a dict with "input_ids" [len],
    as Hugging Face's datasets have. Of a dict, the column `trainable` says what is trained on; without one of this
    default name "labels" say it, that are -100 elsewhere. Without either all tokens are trained on: then all elements
    of a batch have to be without. A column with the name of a mask, such as "completion_mask", has to say the same, and
    is left out. All other columns are payloads. An "attention_mask" of ones, "position_ids" that count from 0 and
    "token_type_ids" of zeros say nothing, and are left out. Or an element is a list of samples or dicts, as all
    attempts at one task, or both sides of a preference: then a batch holds them together.

    Args:
        row_tokens: as in `plan_rows`, like all but `trainable`.
        min_shared_tokens: shared prefixes shorter than this are computed for each sequence.
        objective: "rows" or "tokens".
        pad_rows: fill every row up to `row_tokens`.
        share: "all" or "context".
        trainable: the name of the column that each dict has with one value per token, 1 where it is trained on, else 0:
            "completion_mask" or "assistant_masks" in datasets made for TRL.
        plan_seconds: how long rows are improved.
        plan_attempts: improve for so many attempts instead, which gives the same rows in every process.

    Raises:
        ValueError: an option has no meaning.
    """
    options: dict[str, Any] = {
        "row_tokens": row_tokens,
        "min_shared_tokens": min_shared_tokens,
        "objective": objective,
        "pad_rows": pad_rows,
        "share": share,
        "plan_seconds": plan_seconds,
        "plan_attempts": plan_attempts,
    }
    check_options(**options)
    return Collate(options, trainable)


def _one_by_one(elements: Iterable[Any]) -> Iterator[Any]:
    """The samples of all elements, those of lists of samples among them."""
    for element in elements:
        is_list = isinstance(element, Sequence) and len(element) > 0 and isinstance(element[0], Sample | Mapping)
        yield from element if is_list else (element,)


def _check_all_marked(given: Sequence[Any], samples: Sequence[Sample]) -> None:
    """Refuses elements that do not say what is trained on beside others that do; a `Sample` means what it says."""
    says = [sample.trainable is not None for sample in samples]
    without = [number for number, one in enumerate(given) if not says[number] and not isinstance(one, Sample)]
    if without and any(says):
        raise PayloadError(
            f"Element {without[0]} does not say what is trained on, and others do.",
            why="all of its tokens would be trained on, a prompt too.",
            hint=f"give every element {TRAINABLE!r} or {LABELS!r}; [1] * len(tokens) is all of them.",
        )


def _sample(given: Any, number: int, trainable: str) -> Sample:
    if isinstance(given, Sample):
        return given
    if not isinstance(given, Mapping):
        return Sample(given)
    if TOKENS not in given:
        has = ", ".join(map(repr, given)) or "nothing"
        raise PayloadError(
            f"Element {number} is {a_kind(given)} without {TOKENS!r}; it has {has}.",
            why="nothing says which column the token ids are in.",
            hint="rename the column: dataset.rename_column('tokens', 'input_ids').",
        )
    return _of_columns(dict(given), number, trainable)


def _of_columns(columns: dict[str, Any], number: int, trainable: str) -> Sample:
    tokens = columns.pop(TOKENS)
    for name in _IMPLIED.keys() & columns.keys():
        _check_implied(name, columns.pop(name), tokens, number)
    trained = columns.pop(trainable, None)
    if trained is None and trainable != TRAINABLE:
        raise _without_marks(trainable, columns, number)
    if trained is None and LABELS in columns:
        trained = _labelled(columns.pop(LABELS), tokens, number)
    sample = Sample(tokens, trained)
    if trainable == TRAINABLE:
        _take_out_masks(columns, sample, number)
    # Not as keywords: a column may have the name of an argument.
    sample.payloads.update(columns)
    return sample


_IMPLIED: dict[str, Callable[[int], NDArray[Any]]] = {
    "attention_mask": np.ones,
    "position_ids": np.arange,
    "token_type_ids": np.zeros,
}
"""What may stand in a column that is left out, from the number of its tokens."""


def _without_marks(trainable: str, columns: Mapping[str, Any], number: int) -> PayloadError:
    others = ", ".join(map(repr, columns)) or "none"
    return PayloadError(
        f"Element {number} has nothing in the column {trainable!r}; its others are: {others}.",
        why="it was to say what is trained on, and all tokens would be.",
        hint="pass the name of the column as treecompile_collate(trainable=…), or fill it.",
    )


def _take_out_masks(columns: dict[str, Any], sample: Sample, number: int) -> None:
    """Takes out columns with the name of a mask, which have to say what is known to be trained on."""
    for name in list(filter(is_mask_name, columns)):
        said = Sample(sample.tokens, columns.pop(name))
        if sample.trainable is None or not np.array_equal(said.is_trained, sample.is_trained):
            raise PayloadError(
                f"Element {number} has a column {name!r}, and nothing says that it is what is trained on.",
                why="no loss reads it as a payload: other tokens would be trained on than it says.",
                hint=f"pass treecompile_collate(trainable={name!r}), or leave the column out.",
            )


def _check_implied(name: str, value: Any, tokens: Any, number: int) -> None:
    count = _integers(tokens, TOKENS, number).size
    if not np.array_equal(_integers(value, name, number), _IMPLIED[name](count)):
        raise PayloadError(
            f"{name!r} of element {number} is not that of one sequence without padding.",
            why="samples go to the model as token ids alone.",
            hint="take padding off; what the model has to be given goes in as model({'input_ids': [...], …}).",
        )


def _labelled(labels: Any, tokens: Any, number: int) -> NDArray[np.bool_]:
    """Which tokens have a label, bool [len]."""
    found, ids = _integers(labels, LABELS, number), _integers(tokens, TOKENS, number)
    trained: NDArray[np.bool_] = found != IGNORED_LABEL
    if found.shape == ids.shape and np.array_equal(found[trained], ids[trained]):
        return trained
    raise PayloadError(
        f"'labels' of element {number} are not its own tokens or {IGNORED_LABEL}.",
        why="losses are of the tokens themselves, and predict each from those before it.",
        hint="leave labels unshifted; others go in under another name, and are read by out.logprobs_of.",
    )


def _integers(value: Any, name: str, number: int) -> NDArray[Any]:
    why, hint = "it has one for every token.", "pass one integer for every token."
    return as_array(value, f"{name!r} of element {number}", "integers", why, hint)
