"""Reads rollouts: JSON lines of token ids, or of messages that are turned into token ids here."""

from __future__ import annotations

import json
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
_FORM = 'give one JSON object per line, with "tokens": [ids], or "messages": [{"role": …, "content": …}]'


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
        hint = "pip install tokenizers, or leave --tokenizer out to use bytes"
        raise InputError(f"reading {path} needs the package tokenizers", hint=hint) from error
    try:
        loaded = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        hint = "give the tokenizer.json of a model"
        raise InputError(f"{path} is not a tokenizer file: {error}", hint=hint) from error

    def ids(text: str) -> list[int]:
        return loaded.encode(text, add_special_tokens=False).ids

    def message(role: str, content: str) -> tuple[list[int], list[int]]:
        return ids(f"<|{role}|>\n"), ids(f"{content}<|end|>\n")

    return Tokenizer(loaded.get_vocab_size(), message)


def read_rollouts(path: Path, tokenizer: Tokenizer | None = None) -> list[Rollout]:
    """Reads a file of rollouts.

    Each line is a JSON object with "tokens", a list of ids, and optionally "trainable", one 0 or 1 per token (without
    it the loss is taken on all tokens); or with "messages", of which the assistant's are trained on.

    Args:
        path: a file of JSON lines; empty lines are skipped.
        tokenizer: what turns messages into ids; bytes if none is given.

    Raises:
        InputError: the file cannot be read or has no rollouts; a line that is wrong is named.
    """
    tokenizer = tokenizer or byte_tokenizer()
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read rollouts from {path}: {_reason(error)}", hint=_FORM) from error
    rollouts = [
        _rollout(line, SourceLine(str(path), number), tokenizer)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not rollouts:
        raise InputError(f"there are no rollouts in {path}", hint=_FORM)
    return rollouts


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8 text"


def _rollout(line: str, where: SourceLine, tokenizer: Tokenizer) -> Rollout:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"this line is not JSON: {error}", where=where, hint=_FORM) from error
    if isinstance(record, dict) and "tokens" in record:
        return _from_tokens(record, where)
    if isinstance(record, dict) and "messages" in record:
        return _from_messages(record["messages"], where, tokenizer)
    raise InputError('this line has neither "tokens" nor "messages"', where=where, hint=_FORM)


def _from_tokens(record: dict[str, Any], where: SourceLine) -> Rollout:
    tokens = record["tokens"]
    if not _all_integers(tokens) or not tokens or min(tokens) < 0 or max(tokens) >= 2**63:
        raise InputError('"tokens" is not a list of one or more token ids', where=where, hint=_FORM)
    trainable = record.get("trainable", [1] * len(tokens))
    if (
        not isinstance(trainable, list)
        or len(trainable) != len(tokens)
        or any(mark not in (0, 1) for mark in trainable)
    ):
        raise InputError('"trainable" is not a list of one 0 or 1 per token', where=where)
    return Rollout(np.array(tokens, np.int64), np.array(trainable, np.bool_))


def _all_integers(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)


def _from_messages(messages: object, where: SourceLine, tokenizer: Tokenizer) -> Rollout:
    if not isinstance(messages, list) or not messages:
        raise InputError('"messages" is not a list of one or more messages', where=where, hint=_FORM)
    pieces: list[tuple[list[int], bool]] = []
    for number, message in enumerate(messages):
        role, content = _role_and_content(message, number, where)
        head, body = tokenizer.message(role, content)
        pieces += [(head, False), (body, role == "assistant")]
    return Rollout(_joined((ids for ids, _ in pieces), np.int64), _joined(([own] * len(i) for i, own in pieces), bool))


def _role_and_content(message: object, number: int, where: SourceLine) -> tuple[str, str]:
    role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    if not isinstance(role, str) or not isinstance(content, str):
        raise InputError(f'message {number} has no "role" and "content" that are texts', where=where, hint=_FORM)
    return role, content


def _joined(parts: Iterable[list[Any]], dtype: type) -> NDArray[Any]:
    return np.array([value for part in parts for value in part], dtype)
