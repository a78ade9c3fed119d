"""Reads rollouts: token ids, or messages that are turned into token ids here."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tree_compile.errors import InputError, SourceLine

__all__ = ["BUNDLED", "BYTE_VOCABULARY", "Rollout", "Tokenizer", "byte_tokenizer", "file_tokenizer", "read_rollouts"]

BUNDLED = Path(__file__).with_name("data") / "rollouts.jsonl"

_MESSAGE_START, _MESSAGE_END = 256, 257
BYTE_VOCABULARY = 258
_TOKEN_COLUMNS = ("tokens", "input_ids")
_FORM = 'give one JSON object per line, with "tokens": [ids], or "messages": [{"role": …, "content": …}].'
_NPZ_FORM = 'give an array "tokens" of all ids with an array "lengths"; or one array of ids per sequence.'
_PARQUET_FORM = f"give a column of lists of ids that is called {' or '.join(_TOKEN_COLUMNS)}."
_TRAINABLE_FORM = 'give "trainable" one 0 or 1 for every token, or leave it out to train on all.'
_LINE_WHY = "each line is one rollout."
_ID_WHY = "a token id is a whole number from 0 up to 2**63 - 1."
_EMPTY_WHY = "there is nothing to plan."
_MARK_WHY = "it says of each token whether the loss is taken on it."


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sequence to train on.

    Attributes:
        tokens: token ids, int64 [length].
        trainable: true on the tokens that a loss is taken on, bool [length].
    """

    tokens: NDArray[np.int64]
    trainable: NDArray[np.bool_]


@dataclass(frozen=True)
class Tokenizer:
    """Turns a message into token ids.

    Attributes:
        vocabulary: number of token ids.
        message: (role, content) -> (ids of the head, ids of the content and of the end of the message).
    """

    vocabulary: int
    message: Callable[[str, str], tuple[list[int], list[int]]]


def byte_tokenizer() -> Tokenizer:
    """Makes a tokenizer whose ids are UTF-8 bytes, with 256 at a message's start and 257 at its end."""

    def message(role: str, content: str) -> tuple[list[int], list[int]]:
        return [_MESSAGE_START, *f"{role}\n".encode()], [*content.encode(), _MESSAGE_END]

    return Tokenizer(BYTE_VOCABULARY, message)


def file_tokenizer(path: Path) -> Tokenizer:
    """Loads a tokenizer from a JSON file of the package `tokenizers`.

    Raises:
        InputError: the package is not installed, or the file cannot be read.
    """
    try:
        import tokenizers
    except ImportError as error:
        hint = "pip install tokenizers, or leave --tokenizer out to use bytes."
        raise InputError(
            f"Reading {path} needs the package tokenizers.", why="it is not installed.", hint=hint
        ) from error
    try:
        loaded = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        hint = "give the tokenizer.json of a model."
        raise InputError(f"{path} is not a tokenizer file.", why=_sentence(error), hint=hint) from error

    def ids(text: str) -> list[int]:
        return loaded.encode(text, add_special_tokens=False).ids

    def message(role: str, content: str) -> tuple[list[int], list[int]]:
        return ids(f"<|{role}|>\n"), ids(f"{content}<|end|>\n")

    return Tokenizer(loaded.get_vocab_size(), message)


def read_rollouts(path: Path, tokenizer: Tokenizer | None = None) -> list[Rollout]:
    """Reads a file of rollouts, in the form that the ending of its name says.

    - .npz: an array "tokens" of all ids, one sequence after the other, with an array "lengths"; and optionally
      "trainable", one 0 or 1 per token, or these as packed bits. Or one array of ids per sequence.
    - .parquet: a column of lists of ids called tokens or input_ids, and optionally one called trainable.
    - any other: JSON lines. Each is an object with "tokens" or "input_ids", a list of ids, and optionally "trainable";
      or with "messages", of which the assistant's are trained on: the content is a text or a list of parts with one
      each, and "tool_calls" follow it as JSON. Empty lines are skipped.

    Without "trainable" the loss is taken on all tokens.

    Args:
        path: the file.
        tokenizer: what turns messages into ids; bytes if none is given.

    Raises:
        InputError: the file cannot be read or has no rollouts; the line, array or row that is wrong is named. Or
            pyarrow is not installed, which parquet files need.
    """
    path = Path(path)
    try:
        if path.suffix == ".npz":
            return _from_npz(path)
        if path.suffix == ".parquet":
            return _from_parquet(path)
        return _from_lines(path, tokenizer or byte_tokenizer())
    except (OSError, UnicodeDecodeError) as error:
        hint = "check that the file is there, may be read, and is JSON lines, .npz or .parquet."
        raise InputError(f"Rollouts cannot be read from {path}.", why=f"{_reason(error)}.", hint=hint) from error


def _from_lines(path: Path, tokenizer: Tokenizer) -> list[Rollout]:
    rollouts = [
        _rollout(line, SourceLine(str(path), number), tokenizer)
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1)
        if line.strip()
    ]
    if not rollouts:
        raise InputError(f"There are no rollouts in {path}.", why=_EMPTY_WHY, hint=_FORM)
    return rollouts


def _sentence(error: Exception) -> str:
    """What another library says, with a full stop."""
    return f"{str(error).rstrip('. ')}."


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8 text"


def _rollout(line: str, where: SourceLine, tokenizer: Tokenizer) -> Rollout:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"This line is not JSON: {_sentence(error)}", where=where, why=_LINE_WHY, hint=_FORM
        ) from error
    column = next((name for name in _TOKEN_COLUMNS if isinstance(record, dict) and name in record), None)
    if column is not None:
        return _from_tokens(record, column, where)
    if isinstance(record, dict) and "messages" in record:
        return _from_messages(record["messages"], where, tokenizer)
    raise InputError(
        'This line has neither "tokens", "input_ids" nor "messages".', where=where, why=_LINE_WHY, hint=_FORM
    )


def _from_tokens(record: dict[str, Any], column: str, where: SourceLine) -> Rollout:
    tokens = record[column]
    if not _all_integers(tokens) or not tokens or min(tokens) < 0 or max(tokens) >= 2**63:
        raise InputError(f'"{column}" is not a list of one or more token ids.', where=where, why=_ID_WHY, hint=_FORM)
    trainable = record.get("trainable", [1] * len(tokens))
    if (
        not isinstance(trainable, list)
        or len(trainable) != len(tokens)
        or any(mark not in (0, 1) for mark in trainable)
    ):
        what = '"trainable" is not a list of one 0 or 1 per token.'
        raise InputError(what, where=where, why=_MARK_WHY, hint=_TRAINABLE_FORM)
    return Rollout(np.array(tokens, np.int64), np.array(trainable, np.bool_))


def _all_integers(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)


def _from_messages(messages: object, where: SourceLine, tokenizer: Tokenizer) -> Rollout:
    if not isinstance(messages, list) or not messages:
        what = '"messages" is not a list of one or more messages.'
        raise InputError(what, where=where, why=_LINE_WHY, hint=_FORM)
    pieces: list[tuple[list[int], bool]] = []
    for number, message in enumerate(messages):
        role, content = _role_and_content(message, number, where)
        head, body = tokenizer.message(role, content)
        pieces += [(head, False), (body, role == "assistant")]
    return Rollout(_joined((ids for ids, _ in pieces), np.int64), _joined(([own] * len(i) for i, own in pieces), bool))


def _role_and_content(message: object, number: int, where: SourceLine) -> tuple[str, str]:
    role, content = (message.get("role"), _text(message)) if isinstance(message, dict) else (None, None)
    if not isinstance(role, str) or not isinstance(content, str):
        what = f'Message {number} has no "role" and "content" that are texts.'
        raise InputError(what, where=where, why="a message is turned into ids from both.", hint=_FORM)
    try:
        f"{role}{content}".encode()
    except UnicodeEncodeError as error:
        what = f"Message {number} holds half of a surrogate pair, which is no character."
        hint = r"write characters beyond \uffff as themselves, or as both halves: \ud83d\ude00."
        raise InputError(what, where=where, why="it has no form in UTF-8.", hint=hint) from error
    return role, content


def _text(message: dict[str, Any]) -> object:
    """The content, of which a list is joined, with the calls of tools as JSON after it."""
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(parts) else content
    if calls and isinstance(content, str | None):
        return (content or "") + json.dumps(calls, ensure_ascii=False)
    return content


def _joined(parts: Iterable[list[Any]], dtype: type) -> NDArray[Any]:
    return np.array([value for part in parts for value in part], dtype)


def _from_npz(path: Path) -> list[Rollout]:
    with path.open("rb") as raw:
        if not zipfile.is_zipfile(raw):
            why = "an npz file is a zip archive, and this is none."
            raise InputError(f"{path} is not an npz file.", why=why, hint="write it with numpy.savez.")
        raw.seek(0)
        with np.load(raw, allow_pickle=False) as file:
            if "tokens" in file.files:
                return _from_flat(file, path)
            if "attention_mask" in file.files:
                why = "rollouts are read without padding."
                raise InputError(f"{path} holds an attention_mask, as a padded batch does.", why=why, hint=_NPZ_FORM)
            arrays = [(f'Array "{name}" of {path}', _array(file, name, path)) for name in file.files]
    if not arrays:
        raise InputError(f"There are no rollouts in {path}.", why=_EMPTY_WHY, hint=_NPZ_FORM)
    return [_all_trained(_ids(array, what, _NPZ_FORM)) for what, array in arrays]


def _from_flat(file: Any, path: Path) -> list[Rollout]:
    if "lengths" not in file.files:
        why = "nothing says where a sequence ends."
        raise InputError(f'{path} has an array "tokens" and no array "lengths".', why=why, hint=_NPZ_FORM)
    tokens = _ids(_array(file, "tokens", path), f'Array "tokens" of {path}', _NPZ_FORM)
    lengths = _ids(_array(file, "lengths", path), f'Array "lengths" of {path}', _NPZ_FORM)
    if not lengths.all():
        what = f'Array "lengths" of {path} is 0 at {lengths.argmin()}.'
        raise InputError(what, why=_EMPTY_WHY, hint="leave empty sequences out.")
    # Python's integers do not overflow.
    total = sum(lengths.tolist())
    if total != len(tokens):
        raise InputError(
            f'Array "lengths" of {path} adds up to {total}, and "tokens" has {len(tokens)}.',
            why="every token is of one sequence.",
            hint=_NPZ_FORM,
        )
    trainable = np.ones(len(tokens), np.bool_)
    if "trainable" in file.files:
        trainable = _unpacked_marks(_array(file, "trainable", path), len(tokens), path)
    ends = np.cumsum(lengths)[:-1]
    return [Rollout(*parts) for parts in zip(np.split(tokens, ends), np.split(trainable, ends), strict=True)]


def _array(file: Any, name: str, path: Path) -> NDArray[Any]:
    try:
        return np.asarray(file[name])
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f'Array "{name}" of {path} cannot be read.', why=_sentence(error), hint=_NPZ_FORM) from error


def _unpacked_marks(marks: NDArray[Any], tokens: int, path: Path) -> NDArray[np.bool_]:
    if marks.dtype == np.uint8 and marks.shape == (-(-tokens // 8),) != (tokens,):
        marks = np.unpackbits(marks)[:tokens]
    return _marks(marks, tokens, f'Array "trainable" of {path}')


def _from_parquet(path: Path) -> list[Rollout]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        hint = "pip install 'tree_compile[parquet]'."
        raise InputError(f"Reading {path} needs the package pyarrow.", why="it is not installed.", hint=hint) from error
    try:
        with path.open("rb") as raw:
            file = parquet.ParquetFile(raw)
            names = _columns(file.schema_arrow.names, path)
            table = file.read(columns=names)
    except pa.ArrowException as error:
        raise InputError(f"{path} is not a parquet file.", why=_sentence(error), hint=_PARQUET_FORM) from error
    if not names or names[0] not in _TOKEN_COLUMNS:
        why = "nothing says which column the token ids are in."
        raise InputError(f"{path} has no column tokens and none called input_ids.", why=why, hint=_PARQUET_FORM)
    if not len(table):
        raise InputError(f"There are no rollouts in {path}.", why=_EMPTY_WHY, hint=_PARQUET_FORM)
    rollouts = [
        _all_trained(_ids(ids, f"Row {row} of column {names[0]} of {path}", _PARQUET_FORM))
        for row, ids in enumerate(_lists(table[names[0]]))
    ]
    if "trainable" not in names:
        return rollouts
    return [
        Rollout(rollout.tokens, _marks(marks, len(rollout.tokens), f"Row {row} of column trainable of {path}"))
        for row, (rollout, marks) in enumerate(zip(rollouts, _lists(table["trainable"]), strict=True))
    ]


def _columns(found: list[str], path: Path) -> list[str]:
    """The names of the columns to read."""
    names = [name for name in (*_TOKEN_COLUMNS, "trainable") if name in found]
    for name in names:
        if found.count(name) > 1:
            why = "nothing says which of them is meant."
            what = f"{path} has {found.count(name)} columns called {name}."
            raise InputError(what, why=why, hint="leave out or rename the others.")
    return names


def _lists(column: Any) -> Iterable[NDArray[Any]]:
    """The lists of a column, rows counted from 0. What is no list, or holds nulls, is not of integers."""
    for scalar in column:
        values = getattr(scalar, "values", None)
        yield np.array(None) if values is None else values.to_numpy(zero_copy_only=False)


def _all_trained(tokens: NDArray[np.int64]) -> Rollout:
    return Rollout(tokens, np.ones(len(tokens), np.bool_))


def _ids(values: NDArray[Any], what: str, hint: str) -> NDArray[np.int64]:
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
        raise InputError(f"{what} is not a list of integers.", why=_ID_WHY, hint=hint)
    if not values.size:
        raise InputError(f"{what} is empty.", why=_EMPTY_WHY, hint=hint)
    if values.min() < 0 or values.max() > np.iinfo(np.int64).max:
        wrong = values.min() if values.min() < 0 else values.max()
        raise InputError(f"{what} holds {wrong}.", why=_ID_WHY, hint=hint)
    return values.astype(np.int64)


def _marks(values: NDArray[Any], tokens: int, what: str) -> NDArray[np.bool_]:
    if values.shape != (tokens,) or values.dtype.kind not in "biu" or not np.isin(values, (0, 1)).all():
        raise InputError(f"{what} is not a list of one 0 or 1 per token.", why=_MARK_WHY, hint=_TRAINABLE_FORM)
    return values.astype(np.bool_)
