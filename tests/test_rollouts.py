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


CALLS = [{"type": "function", "function": {"name": "größe", "arguments": "{}"}}]
PARTS = [{"type": "text", "text": "Grü"}, {"type": "text", "text": "ße"}]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": PARTS}, "Grüße"),
        ({"content": None, "tool_calls": CALLS}, json.dumps(CALLS, ensure_ascii=False)),
        ({"content": "now", "tool_calls": CALLS}, "now" + json.dumps(CALLS, ensure_ascii=False)),
        ({"tool_calls": CALLS}, json.dumps(CALLS, ensure_ascii=False)),
        ({"content": "now", "tool_calls": []}, "now"),
    ],
)
def test_content_is_joined_from_its_parts_and_calls(write, message, text):
    (rollout,) = read_rollouts(write({"messages": [{"role": "assistant", **message}]}))
    assert rollout.tokens[rollout.trainable].tolist() == [*text.encode(), 257]


def test_token_ids_may_be_called_as_in_parquet(write):
    (rollout,) = read_rollouts(write({"input_ids": [5, 0], "trainable": [0, 1]}))
    assert rollout.tokens.tolist() == [5, 0]
    assert rollout.trainable.tolist() == [False, True]


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
        ({"messages": [{"role": "user"}]}, "Message 0"),
        ({"messages": [*MESSAGES, {"role": "user", "content": ["parts"]}]}, "Message 2"),
        ({"messages": ["hello"]}, "Message 0"),
        ({"messages": [{"role": "assistant", "content": None}]}, "Message 0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "Message 0"),
        ({"input_ids": [1, -1]}, '"input_ids" is not a list'),
        ({"messages": [*MESSAGES, {"role": "user", "content": "a\ud800"}]}, "Message 2 holds half of a surrogate"),
        ({"messages": [{"role": "\udfff", "content": "a"}]}, "Message 0 holds half of a surrogate"),
    ],
)
def test_wrong_line_is_named_with_its_file(write, line, what):
    path = write({"tokens": [1]}, "", line)
    with pytest.raises(InputError, match=what) as caught:
        read_rollouts(path)
    assert f"at {path}:3" in str(caught.value)


def test_file_that_is_not_text_is_named(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"rollouts\.jsonl\.\n  why: it is not UTF-8"):
        read_rollouts(path)


def test_file_without_rollouts_is_named(write):
    with pytest.raises(InputError, match=r"no rollouts in .*rollouts\.jsonl"):
        read_rollouts(write(""))


FLAT = {"tokens": np.array([5, 0, 7, 1, 2], np.uint16), "lengths": np.array([3, 2], np.int32)}


@pytest.fixture
def npz(tmp_path):
    def write_arrays(**arrays) -> Path:
        np.savez(tmp_path / "rollouts.npz", **arrays)
        return tmp_path / "rollouts.npz"

    return write_arrays


def read_tokens(path: Path) -> list[list[int]]:
    return [rollout.tokens.tolist() for rollout in read_rollouts(path)]


def test_npz_of_all_tokens_is_split_by_its_lengths(npz):
    path = npz(**FLAT, reward=np.array([0.5, 1.0]))
    assert read_tokens(path) == [[5, 0, 7], [1, 2]]
    assert all(rollout.tokens.dtype == np.int64 and rollout.trainable.all() for rollout in read_rollouts(path))


@pytest.mark.parametrize(
    "trainable", [np.array([0, 1, 0, 1, 1]), np.array([0, 1, 0, 1, 1], bool), np.packbits([0, 1, 0, 1, 1])]
)
def test_npz_says_which_tokens_are_trained_on(npz, trainable):
    first, second = read_rollouts(npz(**FLAT, trainable=trainable))
    assert first.trainable.tolist() == [False, True, False]
    assert second.trainable.tolist() == [True, True]


def test_npz_of_one_array_per_sequence_keeps_their_order(npz):
    assert read_tokens(npz(b=np.array([3, 4]), a=np.array([1], np.uint64))) == [[3, 4], [1]]


@pytest.mark.parametrize(
    ("arrays", "what"),
    [
        ({}, "no rollouts in"),
        ({"tokens": FLAT["tokens"]}, 'no array "lengths"'),
        ({**FLAT, "lengths": np.array([3, 3])}, 'Array "lengths" of .* adds up to 6, and "tokens" has 5'),
        ({**FLAT, "lengths": np.array([2**63 - 1, 2**63 - 1, 7])}, "adds up to 18446744073709551621, and"),
        ({**FLAT, "lengths": np.array([5, 0])}, 'Array "lengths" of .* is 0 at 1'),
        ({**FLAT, "lengths": np.array([6, -1])}, 'Array "lengths" of .* holds -1'),
        ({**FLAT, "lengths": np.array([3.0, 2.0])}, 'Array "lengths" of .* is not a list of integers'),
        ({**FLAT, "tokens": FLAT["tokens"].astype(float)}, 'Array "tokens" of .* is not a list of integers'),
        ({**FLAT, "tokens": np.array([[1], [2]])}, 'Array "tokens" of .* is not a list of integers'),
        ({**FLAT, "tokens": np.array([], np.int64)}, 'Array "tokens" of .* is empty'),
        ({**FLAT, "tokens": np.array([1, 2, 3, -4, 5])}, 'Array "tokens" of .* holds -4'),
        ({**FLAT, "trainable": np.array([1, 0])}, 'Array "trainable" of .* one 0 or 1 per token'),
        ({**FLAT, "trainable": np.array([0, 1, 2, 0, 0])}, 'Array "trainable" of .* one 0 or 1 per token'),
        ({**FLAT, "tokens": np.array([{}, 2, 3, 4, 5])}, 'Array "tokens" of .* be read.\n.*allow_pickle=False'),
        ({"a": np.array([1]), "b": np.array([0.5])}, 'Array "b" of .* is not a list of integers'),
        ({"a": np.array([1]), "b": np.array([True])}, 'Array "b" of .* is not a list of integers'),
        ({"a": np.array([1]), "b": np.array([], np.int64)}, 'Array "b" of .* is empty'),
        ({"a": np.array([1]), "b": np.array([2, -1])}, 'Array "b" of .* holds -1'),
        ({"a": np.array([2**63], np.uint64)}, 'Array "a" of .* holds 9223372036854775808'),
        ({"a": np.array(3)}, 'Array "a" of .* is not a list of integers'),
    ],
)
def test_wrong_array_is_named_with_its_file(npz, arrays, what):
    with pytest.raises(InputError, match=what) as caught:
        read_rollouts(npz(**arrays))
    assert "rollouts.npz" in str(caught.value)


def test_file_that_is_no_npz_is_named(tmp_path):
    path = tmp_path / "rollouts.npz"
    np.save(path.open("wb"), np.array([1, 2]))
    with pytest.raises(InputError, match=r"rollouts\.npz is not an npz file"):
        read_rollouts(path)


def test_damaged_npz_is_named(npz):
    path = npz(a=np.arange(1_000))
    content = bytearray(path.read_bytes())
    content[500] ^= 255
    path.write_bytes(content)
    with pytest.raises(InputError, match=r'Array "a" of .*rollouts\.npz cannot be read'):
        read_rollouts(path)


@pytest.fixture
def parquet(tmp_path):
    pa, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def write_columns(row_group_size=None, **columns) -> Path:
        path = tmp_path / "rollouts.parquet"
        writer.write_table(pa.table(columns), path, row_group_size=row_group_size)
        return path

    return write_columns


@pytest.mark.parametrize("name", ["tokens", "input_ids"])
def test_parquet_column_of_lists_is_read(parquet, name):
    path = parquet(**{"task": ["a", "b", "c"], name: [[5, 0, 7], [1], [2, 3]]}, row_group_size=2)
    assert read_tokens(path) == [[5, 0, 7], [1], [2, 3]]
    assert all(rollout.tokens.dtype == np.int64 and rollout.trainable.all() for rollout in read_rollouts(path))


@pytest.mark.parametrize("form", ["large_list", "list_"])
def test_parquet_lists_of_any_integer_type_are_read(parquet, form):
    pa = pytest.importorskip("pyarrow")
    column = pa.array([[1, 2], [3, 4]], getattr(pa, form)(pa.uint16()))
    assert read_tokens(parquet(tokens=column)) == [[1, 2], [3, 4]]


def test_parquet_says_which_tokens_are_trained_on(parquet):
    first, second = read_rollouts(parquet(tokens=[[5, 0, 7], [1]], trainable=[[0, 1, 0], [1]]))
    assert first.trainable.tolist() == [False, True, False]
    assert second.trainable.tolist() == [True]


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ({"ids": [[1]]}, "has no column tokens and none called input_ids"),
        ({"trainable": [[1]]}, "has no column tokens and none called input_ids"),
        ({"tokens": []}, "no rollouts in"),
        ({"tokens": [[1], []]}, "Row 1 of column tokens of .* is empty"),
        ({"tokens": [[1], None]}, "Row 1 of column tokens of .* is not a list of integers"),
        ({"tokens": [[1], [2, None]]}, "Row 1 of column tokens of .* is not a list of integers"),
        ({"tokens": [[1], [2, -3]]}, "Row 1 of column tokens of .* holds -3"),
        ({"tokens": [[1.0], [2.0]]}, "Row 0 of column tokens of .* is not a list of integers"),
        ({"input_ids": [1, 2]}, "Row 0 of column input_ids of .* is not a list of integers"),
        ({"tokens": ["12"]}, "Row 0 of column tokens of .* is not a list of integers"),
        ({"tokens": [[True]]}, "Row 0 of column tokens of .* is not a list of integers"),
        ({"tokens": [[[1]]]}, "Row 0 of column tokens of .* is not a list of integers"),
        ({"tokens": [[1], [2]], "trainable": [[1], [1, 0]]}, "Row 1 of column trainable of .* one 0 or 1 per token"),
        ({"tokens": [[1], [2]], "trainable": [[1], None]}, "Row 1 of column trainable of .* one 0 or 1 per token"),
    ],
)
def test_wrong_row_is_named_with_its_file(parquet, columns, what):
    with pytest.raises(InputError, match=what) as caught:
        read_rollouts(parquet(**columns))
    assert "rollouts.parquet" in str(caught.value)


@pytest.mark.parametrize("name", ["tokens", "trainable"])
def test_parquet_with_two_columns_of_one_name_is_named(tmp_path, name):
    pa, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rollouts.parquet"
    lists = pa.array([[1]])
    writer.write_table(pa.table([lists] * 3, names=["input_ids", name, name]), path)
    with pytest.raises(InputError, match=rf"rollouts\.parquet has 2 columns called {name}"):
        read_rollouts(path)


def test_file_that_is_no_parquet_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "rollouts.parquet"
    path.write_text('{"tokens": [1]}\n')
    with pytest.raises(InputError, match=r"rollouts\.parquet is not a parquet file"):
        read_rollouts(path)


def test_missing_pyarrow_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"needs the package pyarrow\.\n.*\n.*pip install 'tree_compile\[parquet\]'"):
        read_rollouts(tmp_path / "rollouts.parquet")


@pytest.mark.parametrize("ending", ["jsonl", "npz", "parquet"])
def test_missing_file_of_any_form_is_named(tmp_path, ending):
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    with pytest.raises(InputError, match=rf"none\.{ending}\.\n  why: No such file"):
        read_rollouts(tmp_path / f"none.{ending}")


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
    with pytest.raises(InputError, match=r"needs the package tokenizers\.\n.*\n.*pip install tokenizers"):
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
