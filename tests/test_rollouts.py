"""Rollout files are read exactly, and a wrong line is named."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tree_compile.errors import InputError
from tree_compile.rollouts import BUNDLED, BYTE_VOCABULARY, file_tokenizer, read_rollouts

ROOT = Path(__file__).resolve().parents[1]
MESSAGES = [
    {"role": "user", "content": "Grüße"},
    {"role": "assistant", "content": "hi"},
]


@pytest.fixture
def write(tmp_path):
    def write_lines(*records) -> Path:
        path = tmp_path / "rollouts.jsonl"
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), "utf-8")
        return path

    return write_lines


def test_line_separators_inside_a_text_do_not_end_the_line(write):
    path = write(json.dumps({"messages": [{"role": "user", "content": "a\u2028b"}]}, ensure_ascii=False))
    assert len(read_rollouts(path)) == 1


def test_tokens_are_read_as_they_are_and_all_trained(write):
    (rollout,) = read_rollouts(write({"tokens": [5, 0, 7]}))
    assert rollout.tokens.tolist() == [5, 0, 7]
    assert rollout.tokens.dtype == np.int64
    assert rollout.trainable.tolist() == [True] * 3


def test_trainable_tokens_are_those_marked(write):
    (rollout,) = read_rollouts(write({"tokens": [5, 0, 7], "trainable": [0, 1, 0]}))
    assert rollout.trainable.tolist() == [False, True, False]


def test_messages_become_bytes_between_marks(write):
    (rollout,) = read_rollouts(write({"messages": MESSAGES}))
    assert rollout.tokens.tolist() == [
        *(256, *b"user\n", *"Grüße".encode(), 257),
        *(256, *b"assistant\n", *b"hi", 257),
    ]
    assert rollout.tokens.max() < BYTE_VOCABULARY


def test_only_what_the_assistant_says_is_trained(write):
    (rollout,) = read_rollouts(write({"messages": MESSAGES}))
    assert rollout.tokens[rollout.trainable].tolist() == [*b"hi", 257]


def test_messages_that_begin_alike_give_tokens_that_begin_alike(write):
    short, long = read_rollouts(write({"messages": MESSAGES[:1]}, {"messages": MESSAGES}))
    assert long.tokens[: len(short.tokens)].tolist() == short.tokens.tolist()


def test_empty_lines_are_skipped(write):
    assert len(read_rollouts(write("", {"tokens": [1]}, "   ", {"tokens": [2]}))) == 2


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{not json", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1, 2]", "neither"),
        ({"text": "hello"}, "neither"),
        ({"tokens": []}, "one or more token ids"),
        ({"tokens": [1, -1]}, "one or more token ids"),
        ({"tokens": [1, 2.0]}, "one or more token ids"),
        ({"tokens": [True]}, "one or more token ids"),
        ({"tokens": [2**63]}, "one or more token ids"),
        ({"tokens": "12"}, "one or more token ids"),
        ({"tokens": [1, 2], "trainable": [1]}, "one 0 or 1 per token"),
        ({"tokens": [1, 2], "trainable": [1, 2]}, "one 0 or 1 per token"),
        ({"tokens": [1, 2], "trainable": [1, [0]]}, "one 0 or 1 per token"),
        ({"messages": []}, "one or more messages"),
        ({"messages": [{"role": "user"}]}, "message 0"),
        ({"messages": [*MESSAGES, {"role": "user", "content": ["parts"]}]}, "message 2"),
        ({"messages": ["hello"]}, "message 0"),
    ],
)
def test_wrong_line_is_named_with_its_file(write, line, what):
    path = write({"tokens": [1]}, "", line)
    with pytest.raises(InputError, match=what) as caught:
        read_rollouts(path)
    assert f"at {path}:3" in str(caught.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"none\.jsonl: No such file"):
        read_rollouts(tmp_path / "none.jsonl")


def test_file_that_is_not_text_is_named(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"rollouts\.jsonl: it is not UTF-8"):
        read_rollouts(path)


def test_file_without_rollouts_is_named(write):
    with pytest.raises(InputError, match=r"no rollouts in .*rollouts\.jsonl"):
        read_rollouts(write(""))


@pytest.fixture
def tokenizer_file(tmp_path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<|user|>": 0, "<|assistant|>": 1, "hi": 2, "<|end|>": 3, "?": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    split = tokenizers.Regex(r"<\|\w+\|>|\w+")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(split, "removed", invert=True)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_tokenizer_file_gives_the_ids(write, tokenizer_file):
    tokenizer = file_tokenizer(tokenizer_file)
    (rollout,) = read_rollouts(write({"messages": MESSAGES}), tokenizer)
    assert tokenizer.vocabulary == 5
    assert rollout.tokens.tolist() == [0, 4, 3, 1, 2, 3]
    assert rollout.tokens[rollout.trainable].tolist() == [2, 3]


def test_file_that_is_no_tokenizer_is_named(write):
    pytest.importorskip("tokenizers")
    with pytest.raises(InputError, match=r"rollouts\.jsonl is not a tokenizer file"):
        file_tokenizer(write({"tokens": [1]}))


def test_missing_tokenizers_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match=r"needs the package tokenizers\n.*pip install tokenizers"):
        file_tokenizer(tmp_path / "tokenizer.json")


def test_bundled_rollouts_share_prefixes_and_repeat_some():
    texts = [rollout.tokens.tobytes() for rollout in read_rollouts(BUNDLED)]
    assert len(texts) == 64
    assert len(set(texts)) < 64
    assert BUNDLED.stat().st_size < 400_000
    firsts = np.array([np.frombuffer(text, np.int64)[:900] for text in texts])
    assert np.all(firsts == firsts[0])


def test_bundled_rollouts_have_attempts_at_several_tasks():
    records = [json.loads(line) for line in BUNDLED.read_text("utf-8").splitlines()]
    assert len({record["task"] for record in records}) == 8
    assert {record["attempt"] for record in records} == set(range(8))
    assert {message["role"] for record in records for message in record["messages"]} == {
        *("system", "user", "assistant", "tool")
    }


def test_script_writes_the_bundled_rollouts_again(tmp_path):
    path = tmp_path / "again.jsonl"
    subprocess.run([sys.executable, ROOT / "examples" / "make_rollouts.py", "--out", path], check=True)
    assert path.read_bytes() == BUNDLED.read_bytes()
