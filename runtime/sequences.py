"""The sequences of one call, checked and brought into one form."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tree_compile.errors import (
    EmptySequenceError,
    PayloadError,
    SequenceTooLongError,
    TokenRangeError,
    TokenTypeError,
)
from tree_compile.runtime.counts import a_kind, count_of

if TYPE_CHECKING:
    import torch

    from tree_compile.runtime.samples import Sample, Samples

__all__ = [
    "PADDED_HINT",
    "TOKENS",
    "Batch",
    "IntArray",
    "Sequences",
    "TokenArray",
    "TokenSequence",
    "as_array",
    "as_batch",
    "as_it_lies",
    "check_fits",
    "input_names",
]

IntArray: TypeAlias = NDArray[np.int64]
TokenArray: TypeAlias = NDArray[np.integer[Any]]
TokenSequence: TypeAlias = "Sequence[int] | NDArray[Any] | torch.Tensor"
Sequences: TypeAlias = "Sequence[TokenSequence] | Sequence[Sample] | Mapping[str, Sequence[TokenSequence]] | Batch"

TOKENS = "input_ids"
"""The name of the input that holds the tokens."""
_LIST_HINT = "pass a list of sequences, one list or 1-D tensor of token ids each."
_TEXT_HINT = "turn texts into token ids with the model's tokenizer first: tokenizer(text)['input_ids']."
_DICT_HINT = (
    "pass one dict of lists, {'input_ids': [sequence, …], 'a_payload': [values, …]}; or, of rows of a dataset, the "
    "plan that treecompile_collate()(rows) makes."
)
_ONE_HINT = f"{_LIST_HINT[:-1]}: [ids] for a single one."
PADDED_HINT = (
    "pass a list of sequences without padding: "
    "[ids[mask == 1] for ids, mask in zip(input_ids, attention_mask)]; sequences of one length: list(input_ids)."
)
"""For tensors and arrays."""
_EMPTY_WHY = "there is nothing to compute."
_TYPE_WHY = "token ids and payloads are whole numbers, one list of them per sequence."


@dataclass(frozen=True, eq=False)
class Batch:
    """The checked inputs of one call: compiled code reads the arrays by their addresses, so all come from `as_batch`.

    Attributes:
        inputs: one list of integer arrays of shape [len_i] per input name; sequence i is element i of every list.
            The first name is that of the tokens, the others are payloads. Arrays are not copied, and keep their
            integer type. They have to stay as they are until the rows of a plan are made from them, though a tensor may
            be moved by torch: `as_it_lies` has its array then.
        samples: the samples that the sequences are of; None where they are sequences alone.
        tables: for inputs that number something, what each number stands for, `[numbers, …]`: it is what a row gets.
        part_of: the number of sequences of the batch that these are a part of; None where they are all of it.
        is_complete: whether more sequences of the batch may come, as with a `Planner`: False then.
    """

    inputs: dict[str, list[TokenArray]]
    samples: Samples | None = None
    tables: Mapping[str, IntArray] = field(default_factory=dict)
    part_of: int | None = None
    is_complete: bool = True

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def tokens(self) -> list[TokenArray]:
        """The token ids of every sequence."""
        return next(iter(self.inputs.values()))

    @property
    def lengths(self) -> IntArray:
        """Tokens per sequence, int64 [number of sequences]."""
        return np.fromiter(map(len, self.tokens), np.int64, len(self))

    @property
    def whole(self) -> int | None:
        """The number of sequences of the whole batch; None where that is not known."""
        return (self.part_of or len(self)) if self.is_complete else None

    def of(self, ids: Iterable[int]) -> Batch:
        """Some of its sequences, in the order of `ids`; what is counted over the whole batch stays so."""
        ids = list(ids)
        samples = self.samples and self.samples.of(ids)
        inputs = {name: [values[i] for i in ids] for name, values in self.inputs.items()}
        return replace(self, inputs=inputs, samples=samples, part_of=self.whole)


def as_batch(inputs: Sequences, first: int = 0) -> Batch:
    """Checks the sequences of a call.

    Args:
        inputs: a list of sequences, each a list of ints, a 1-D integer array or a 1-D integer tensor on any
            device; or a dict of such lists, where the entry "input_ids" (the first one where that name is missing)
            holds the tokens and the others one integer per token. A `Batch` is returned as it is.
        first: the number that errors give to the first sequence.

    Raises:
        EmptySequenceError: there is no sequence, or one has no tokens.
        TokenTypeError: a sequence is not one-dimensional or not of integers, or a padded batch is given.
        TokenRangeError: a token id is negative, or does not fit in 64 bits.
        PayloadError: a payload has not one value per token.
    """
    if isinstance(inputs, Batch):
        return inputs
    named = _tokens_first(inputs) if isinstance(inputs, Mapping) else {TOKENS: inputs}
    batch = Batch({name: _sequence_list(values, name, first) for name, values in named.items()})
    for name in batch.inputs:
        _check_aligned(batch, name, first)
    _check_not_negative(batch, first)
    return batch


def input_names(inputs: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of a dict of inputs as `as_batch` orders them: that of the tokens comes first."""
    return tuple(sorted(inputs, key=lambda name: name != TOKENS))


def as_array(value: Any, label: str, items: str, why: str, hint: str) -> NDArray[Any]:
    """One list, array or tensor on any device as an array.

    Args:
        value: the list, array or tensor.
        label: what errors call it.
        items: what errors say that it should be a list of.
        why: why it should.
        hint: what to try where it is something else.

    Raises:
        TokenTypeError: it is none of these, or has no value in some places.
    """
    if isinstance(value, np.ndarray):
        return _without_mask(value, label, why)
    if _is_tensor(value):
        return _tensor_as_array(value, label, items, why)
    if not _is_list(value):
        raise TokenTypeError(f"{label} is {a_kind(value)}, not a list of {items}.", why=why, hint=hint)
    try:
        return np.asarray(value)
    # The last one is torch's, for numbers that require a gradient.
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        deeper = next((place for place, part in enumerate(value) if _is_list(part)), None)
        reason = str(error).rstrip(".") if deeper is None else f"there is a list at position {deeper}"
        raise TokenTypeError(f"{label} is not a flat list of {items}: {reason}.", why=why, hint=hint) from error


def as_it_lies(array: TokenArray) -> TokenArray:
    """An array of a `Batch` where its numbers are now.

    torch moves a CPU tensor into other memory when it is sent to another process, as by the worker of a DataLoader,
    and frees what an array was made on.
    """
    tensor: Any = array.base
    if tensor is None or not _is_tensor(tensor) or tensor.data_ptr() == array.__array_interface__["data"][0]:
        return array
    moved: TokenArray = tensor.numpy()
    return moved


def check_fits(lengths: IntArray, row_tokens: int, first: int = 0) -> None:
    """Refuses sequences that are longer than a row.

    Args:
        lengths: tokens of each sequence, int64 [number of sequences].
        row_tokens: the greatest number of tokens in a row.
        first: the number that errors give to the first sequence.

    Raises:
        SequenceTooLongError: names the first sequence that does not fit.
    """
    too_long = np.flatnonzero(lengths > row_tokens)
    if len(too_long):
        of_all = f"; {len(too_long)} of {len(lengths)} sequences are too long" if len(lengths) > 1 else ""
        raise SequenceTooLongError(
            f"Sequence {first + too_long[0]} has {lengths[too_long[0]]} tokens, and row_tokens is {row_tokens}.",
            why=f"a sequence is never split over rows{of_all}.",
            hint=f"raise row_tokens to {lengths.max()}, or shorten or leave out what is longer.",
        )


def _tokens_first(inputs: Mapping[str, Any]) -> dict[str, Any]:
    if not inputs:
        raise EmptySequenceError("The dict of inputs has no entries.", why=_EMPTY_WHY, hint=_LIST_HINT)
    if "attention_mask" in inputs:
        raise TokenTypeError(
            "The inputs hold an attention_mask, as a padded batch does.",
            why="which tokens see each other follows from the sequences alone.",
            hint=PADDED_HINT,
        )
    return {name: inputs[name] for name in input_names(inputs)}


def _sequence_list(values: Any, name: str, first: int) -> list[TokenArray]:
    if _is_tensor(values) or isinstance(values, np.ndarray):
        what = f"{name} is one {values.ndim}-D {type(values).__name__}, not a list of sequences."
        raise TokenTypeError(what, why="sequences differ in length.", hint=_tensor_hint(values.ndim))
    if not _is_list(values):
        what = f"{name} is {a_kind(values)}, not a list of sequences."
        hint = "pass its plan: model(ready.plan)." if hasattr(values, "plan") else _LIST_HINT
        raise TokenTypeError(what, why=_TYPE_WHY, hint=hint)
    if not values:
        raise EmptySequenceError(f"{name} has no sequences.", why=_EMPTY_WHY, hint=_LIST_HINT)
    return [_as_integers(values[i], f"Sequence {first + i} of {name}") for i in range(len(values))]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _tensor_hint(dimensions: int) -> str:
    return _ONE_HINT if dimensions == 1 else PADDED_HINT


def _as_integers(value: Any, label: str) -> TokenArray:
    if _is_tensor(value) and value.numel() and (value.is_floating_point() or value.is_complex()):
        raise _not_integers(label, value.dtype)
    array = as_array(value, label, "integers", _TYPE_WHY, _hint_for(value))
    if array.ndim != 1:
        hint = _LIST_HINT if array.ndim else _ONE_HINT
        raise TokenTypeError(f"{label} has {array.ndim} dimensions, not one.", why=_TYPE_WHY, hint=hint)
    if array.size == 0:
        raise EmptySequenceError(f"{label} is empty.", why=_EMPTY_WHY, hint="leave empty sequences out.")
    if array.dtype.kind in "Of" and all(map(_is_whole, entries := value if _is_list(value) else array)):
        # NumPy has one type for all of them where they fit in 64 bits, with or without a sign, but no integer type.
        return _as_signed(np.array(list(map(int, entries)), object), label)
    if array.dtype.kind not in "iu":
        raise _not_integers(label, array.dtype)
    if array.dtype.itemsize == 8 and array.dtype.kind == "u":
        return _as_signed(array, label)
    return array


def _is_whole(number: object) -> bool:
    return isinstance(number, int | np.integer) and not isinstance(number, bool)


def _as_signed(array: NDArray[Any], label: str) -> IntArray:
    for number in (int(array.max()), int(array.min())):
        if not -(2**63) <= number < 2**63:
            raise TokenRangeError(
                f"{label} holds {number}, which does not fit in 64 signed bits.",
                why="tokens are computed as int64.",
                hint="check where the token ids come from.",
            )
    return array.astype(np.int64)


def _hint_for(value: Any) -> str:
    if isinstance(value, str):
        return _TEXT_HINT
    if isinstance(value, int | np.integer):
        return _ONE_HINT
    return _DICT_HINT if isinstance(value, Mapping) else _LIST_HINT


def _without_mask(array: NDArray[Any], label: str, why: str) -> NDArray[Any]:
    if not isinstance(array, np.ma.MaskedArray):
        return array
    if np.ma.is_masked(array):
        what = f"{label} is an array in which some values are masked."
        raise TokenTypeError(what, why=why, hint="leave them out, or fill them: array.compressed(), array.filled(0).")
    return array.data


def _tensor_as_array(value: Any, label: str, items: str, why: str) -> NDArray[Any]:
    if value.is_meta or value.is_quantized or str(value.layout) != "torch.strided":
        kind = "on the meta device" if value.is_meta else f"of the layout {value.layout}"
        kind = "of quantized numbers" if value.is_quantized else kind
        what = f"{label} is a tensor {kind}, not a list of {items}."
        raise TokenTypeError(what, why=why, hint="pass a dense tensor with values.")
    # NumPy has no bfloat16.
    array: NDArray[Any] = (value.detach().cpu().double() if value.is_floating_point() else value.detach().cpu()).numpy()
    return array


def _not_integers(label: str, dtype: object) -> TokenTypeError:
    what = f"{label} is of type {dtype}, not of integers."
    is_text = isinstance(dtype, np.dtype) and dtype.kind == "U"
    return TokenTypeError(what, why=_TYPE_WHY, hint=_TEXT_HINT if is_text else "convert it to an integer type first.")


def _is_tensor(value: Any) -> bool:
    # A tensor can only exist where torch has been imported already; planning alone should not import it.
    torch_module = sys.modules.get("torch")
    return torch_module is not None and isinstance(value, torch_module.Tensor)


def _check_aligned(batch: Batch, name: str, first: int) -> None:
    tokens_name, values = next(iter(batch.inputs)), batch.inputs[name]
    if len(values) != len(batch):
        raise PayloadError(
            f"{name} has {count_of(len(values), 'sequence')}, {tokens_name} has {len(batch)}.",
            why="a payload has one list for every sequence.",
            hint=f"give {name} as many lists as {tokens_name} has.",
        )
    for i, (payload, tokens) in enumerate(zip(values, batch.tokens, strict=True), first):
        if len(payload) != len(tokens):
            raise PayloadError(
                f"Sequence {i} has {count_of(len(payload), 'value')} in {name} and {len(tokens)} in {tokens_name}.",
                why="a payload has one value per token.",
                hint=f"give {name} one value for every token, or pass what is constant in forward_kwargs.",
            )


def _check_not_negative(batch: Batch, first: int) -> None:
    for i, tokens in enumerate(batch.tokens, first):
        if tokens.min() < 0:
            at = int((tokens < 0).argmax())
            raise TokenRangeError(
                f"Sequence {i} holds the token id {tokens[at]} at position {at}.",
                why="token ids count from 0.",
                hint="leave padding and ignored labels out of the tokens.",
            )
