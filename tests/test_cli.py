"""The command line: what it prints, what it returns, and how it says what is wrong."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tree_compile.cli import main
from tree_compile.demo import DemoReport
from tree_compile.programs import BACKENDS

ROOT = Path(__file__).resolve().parents[1]
SHARED_TOKENS = list(range(1, 101))


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def rollouts(tmp_path) -> Path:
    """Three rollouts that share 100 tokens."""
    path = tmp_path / "rollouts.jsonl"
    ends = ([101, 102, 103], [104] * 9, [101, 102, 105])
    path.write_text("".join(json.dumps({"tokens": SHARED_TOKENS + end}) + "\n" for end in ends))
    return path


@pytest.fixture
def module(tmp_path, monkeypatch) -> str:
    """The name of a module in the current directory that makes models."""
    (tmp_path / "makers_of_models.py").write_text(
        "import torch\n"
        "import torch.nn.functional as F\n"
        "from tree_compile.models.dense import Dense, DenseConfig\n"
        "def small():\n"
        "    return Dense(DenseConfig(vocab_size=258, width=32, layers=1, heads=2, kv_heads=1, hidden=32))\n"
        "class Mean(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embedding = torch.nn.Embedding(50, 8)\n"
        "    def forward(self, input_ids):\n"
        "        x = self.embedding(input_ids)\n"
        "        return x + x.mean(1, keepdim=True)  # the guilty line\n"
        "mean = Mean\n"
        "instance = small()\n"
        "def broken():\n"
        "    return 1 / 0  # the broken line\n"
        "def nothing():\n"
        "    return None\n"
    )
    monkeypatch.chdir(tmp_path)
    yield "makers_of_models"
    sys.modules.pop("makers_of_models", None)


def report(**changes) -> DemoReport:
    values = {
        "sequences": 64,
        "parameters": 1000,
        "input_tokens": 3000,
        "packed_tokens": 1000,
        "rows": 2,
        "row_bound": 1,
        "logit_difference": 1e-6,
        "gradient_difference": 2e-6,
        "tolerance": 1e-4,
        "packed_losses": [5.0, 4.0],
        "unpacked_losses": [5.0, 4.0],
        "packed_seconds": 1.0,
        "unpacked_seconds": 2.5,
        "compile_seconds": 20.0,
    }
    return DemoReport(**{**values, **changes})


def test_help_lists_the_commands_without_loading_torch():
    code = (
        "import sys\n"
        "from tree_compile.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in ("demo", "check", "explain", "pack"))
    assert done.stdout.endswith("False\n")


def test_module_runs_as_the_command_does():
    import tree_compile

    assert python("-m", "tree_compile", "--version").stdout == f"treecompile {tree_compile.__version__}\n"


def test_demo_trains_equally_both_ways(rollouts, capsys):
    assert main(["demo", "--rollouts", str(rollouts), "--steps", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert (found["input_tokens"], found["packed_tokens"], found["rows"]) == (315, 115, 1)
    assert found["ideal_speed_up"] == pytest.approx(315 / 115)
    assert found["packed_losses"] == pytest.approx(found["unpacked_losses"], rel=1e-3)
    assert len(found["packed_losses"]) == 3
    assert found["packed_losses"][-1] < found["packed_losses"][0]


def test_demo_prints_its_figures(rollouts, capsys, monkeypatch):
    monkeypatch.setattr("tree_compile.demo.run_demo", lambda *_: report())
    assert main(["demo", "--rollouts", str(rollouts)]) == 0
    text = capsys.readouterr().out
    for figure in ("3,000", "1,000", "2 (at least 1)", "2.50 s", "1.00 s", "2.50", "3.00", "1.0e-06", "2.0e-06"):
        assert figure in text
    assert "equal within 1e-04" in text


@pytest.mark.parametrize(("seconds", "is_above"), [(2.5, False), (3.1, False), (14.0, True)])
def test_demo_remarks_on_a_speed_up_above_the_ideal(rollouts, capsys, monkeypatch, seconds, is_above):
    monkeypatch.setattr("tree_compile.demo.run_demo", lambda *_: report(unpacked_seconds=seconds))
    assert main(["demo", "--rollouts", str(rollouts)]) == 0
    assert ("above the ideal" in " ".join(capsys.readouterr().out.split())) is is_above


def test_demo_takes_turns_row_by_row(rollouts, capsys, monkeypatch):
    from tree_compile import demo

    calls = []
    for side, method, letter in ((demo._Packed, "row", "r"), (demo._Unpacked, "sequence", "s")):
        original = getattr(side, method)

        def noted(self, what, original=original, letter=letter):
            calls.append(letter)
            return original(self, what)

        monkeypatch.setattr(side, method, noted)
    assert main(["demo", "--rollouts", str(rollouts), "--steps", "2", "--row-tokens", "110"]) == 0
    assert "".join(calls) in ("rssrs" * 2, "rsrss" * 2)


def test_stages_are_lines_where_the_output_is_no_terminal(rollouts, capsys):
    assert main(["demo", "--rollouts", str(rollouts), "--steps", "2"]) == 0
    lines = [line.strip().split("  ")[1:] for line in capsys.readouterr().err.splitlines()]
    for stage in ("compile, compare", "1 more step"):
        own = [rest for name, *rest in lines if name == stage]
        assert own[0] == []
        assert own[-1] == ["100%"]


def test_check_says_what_it_checks_before_an_error(capsys):
    assert main(["check", "nosuch"]) == 2
    first, *_ = capsys.readouterr().err.splitlines()
    assert first.endswith(" s  check nosuch")


def test_check_says_what_the_first_call_does(capsys):
    logger = logging.getLogger("tree_compile")
    handlers, level = list(logger.handlers), logger.level
    assert main(["explain", "llama"]) == 0
    lines = [line.partition(" s  ")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines[:2] == ["explain llama", "explain llama: capturing and rewriting LlamaForCausalLM in train mode"]
    assert lines[2].startswith("explain llama: comparing 6 sequences")
    assert (logger.handlers, logger.level) == (handlers, level)


def test_grpo_demo_has_the_gradients_of_the_unpacked_model(tmp_path, capsys):
    assert main(["demo", "--grpo", "--steps", "2", "--plot", str(tmp_path / "out.png"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert 0 < found["gradient_difference"] < 1e-4
    assert len(found["rewards"]) == 2
    assert 0.3 < found["first_reward"] < 0.7
    assert found["unpacked_tokens"] == [256 * (12 * 10 + 5 + 4)] * 2
    assert found["tokens_saved"] > 20


def grpo_report(rewards, gradient_difference=1e-6):
    from tree_compile.grpo_demo import GrpoReport

    return GrpoReport(rewards, [1000] * len(rewards), [25] * len(rewards), gradient_difference)


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (grpo_report([0.2] + [0.9] * 299), 0),
        (grpo_report([0.2] * 300), 1),
        (grpo_report([0.2] * 10), 0),
        (grpo_report([0.2] + [0.9] * 299, gradient_difference=1e-3), 1),
    ],
    ids=["reached", "not reached", "too few steps to reach it", "gradients differ"],
)
def test_grpo_demo_says_whether_it_got_there(tmp_path, capsys, monkeypatch, given, status):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("tree_compile.grpo_demo.run_grpo_demo", lambda *_: given)
    path = tmp_path / "out.png"
    assert main(["demo", "--grpo", "--plot", str(path)]) == status
    text = " ".join(capsys.readouterr().out.split())
    assert ("NOT" in text) is bool(status)
    assert "tokens of samples per token computed 40.0" in text.replace("│", "").replace("  ", " ")
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_grpo_demo_looks_whether_it_can_draw_before_it_trains(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tree_compile.grpo_demo.run_grpo_demo", lambda *_: pytest.fail("it trained"))
    assert main(["demo", "--grpo", "--plot", str(tmp_path / "none" / "out.png")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(SystemExit):
        main(["demo", "--grpo", "--plot", str(tmp_path / "out.png")])
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--grpo", "--row-tokens", "5"], ["--plot", "x.png"]])
def test_demo_refuses_options_of_the_other_one(words, capsys):
    with pytest.raises(SystemExit):
        main(["demo", *words])
    assert "--grpo" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "explain", "demo", "pack"])
def test_unknown_option_is_told_with_the_usage_of_its_command(command, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([command, *(["x"] if command != "demo" else []), "--bckend", "eager"])
    error = capsys.readouterr().err
    assert error.startswith(f"usage: treecompile {command} ")
    assert "unrecognized arguments: --bckend" in error


def test_demo_fails_where_the_two_differ(rollouts, capsys, monkeypatch):
    monkeypatch.setattr("tree_compile.demo.run_demo", lambda *_: report(gradient_difference=2e-4))
    assert main(["demo", "--rollouts", str(rollouts)]) == 1
    assert "NOT EQUAL" in capsys.readouterr().out


def test_demo_takes_its_loss_on_trainable_tokens_of_the_whole_batch():
    from tree_compile.demo import _Loss
    from tree_compile.rollouts import Rollout

    tokens, trainable = torch.tensor([1, 2, 3]).numpy(), torch.tensor([True, False, True]).numpy()
    loss = _Loss([Rollout(tokens, trainable), Rollout(tokens, ~trainable)])
    logits = torch.randn(3, 5)
    assert loss(logits, 0) == -logits[1].log_softmax(-1)[3] / 2
    assert loss(logits, 1) == -logits[0].log_softmax(-1)[2] / 2


def test_check_of_an_own_model_says_equal(module, capsys):
    assert main(["check", f"{module}:small"]) == 0
    assert capsys.readouterr().out.startswith("equal to the unpacked model")


def test_check_compares_on_rollouts(module, rollouts, capsys, monkeypatch):
    monkeypatch.setitem(BACKENDS, "inductor", BACKENDS["eager"])
    assert main(["check", f"{module}:small", "--rollouts", str(rollouts), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert (found["input_tokens"], found["packed_tokens"]) == (315, 115)


def test_check_fails_where_the_models_differ(module, capsys, monkeypatch):
    from tree_compile.selfcheck import CheckReport

    worse = CheckReport(0.1, 0.1, 1e-4, "head.weight", 10, 5, 1)
    monkeypatch.setattr("tree_compile.api.TreeModel.check", lambda *_: worse)
    assert main(["check", f"{module}:small"]) == 1
    assert capsys.readouterr().out.startswith("NOT EQUAL")


def test_explain_names_the_line_of_every_attention(module, tmp_path, capsys):
    assert main(["explain", f"{module}:small"]) == 0
    text = capsys.readouterr().out
    assert text.count("attention in ") == 1
    assert "models/dense.py:" in text


def test_explain_of_an_architecture_gives_json(capsys):
    pytest.importorskip("transformers")
    assert main(["explain", "mistral", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(finding["kind"] == "attention" for finding in found["findings"]) == 2
    assert all(finding["where"]["file"].endswith("modeling_mistral.py") for finding in found["findings"])


def test_refused_model_is_one_message_with_the_users_line(module, tmp_path, capsys):
    assert main(["explain", f"{module}:mean"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert f"at {tmp_path}/makers_of_models.py:12" in error
    assert "the guilty line" in error


def test_failing_factory_is_named_with_its_line(module, tmp_path, capsys):
    assert main(["check", f"{module}:broken"]) == 2
    error = capsys.readouterr().err
    assert f"{module}:broken failed with ZeroDivisionError" in error
    assert f"at {tmp_path}/makers_of_models.py:16" in error


@pytest.mark.parametrize(
    ("target", "what"),
    [
        ("{module}:nothing", "gave a NoneType, not an nn.Module"),
        ("{module}:absent", "has no function 'absent'"),
        ("{module}:instance", "has no function 'instance'"),
        ("no_such_module:small", "no_such_module failed with ModuleNotFoundError"),
        ("no_such_family", "knows no model type 'no_such_family'"),
    ],
)
def test_wrong_target_is_named(module, target, what, capsys):
    assert main(["explain", target.format(module=module)]) == 2
    assert what in capsys.readouterr().err


def test_wrong_line_of_rollouts_is_one_message(rollouts, capsys):
    rollouts.write_text(rollouts.read_text() + '{"tokens": []}\n')
    assert main(["demo", "--rollouts", str(rollouts)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("treecompile: error: ")
    assert f"at {rollouts}:4" in output.err
    assert "Traceback" not in output.err


def test_traceback_is_shown_on_request(tmp_path, capsys):
    assert main(["demo", "--rollouts", str(tmp_path / "none.jsonl"), "--traceback"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_unexpected_error_names_its_type_and_how_to_see_more(rollouts, capsys, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of luck")

    monkeypatch.setattr("tree_compile.demo.run_demo", fail)
    assert main(["demo", "--rollouts", str(rollouts)]) == 2
    assert "RuntimeError: out of luck\n  try: --traceback" in capsys.readouterr().err


def test_rollout_longer_than_a_row_is_refused(rollouts, capsys):
    assert main(["demo", "--rollouts", str(rollouts), "--row-tokens", "105"]) == 2
    error = capsys.readouterr().err
    assert "109" in error
    assert "105" in error


@pytest.mark.parametrize("words", [["--steps", "1"], ["--steps", "many"], ["--row-tokens", "0"]])
def test_number_out_of_range_is_refused(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["demo", *words])
    assert "is not a whole number of at least" in capsys.readouterr().err


@pytest.fixture
def as_file(tmp_path):
    """Writes 100 shared tokens with three endings in the form that an ending of a file name says."""
    sequences = [SHARED_TOKENS + end for end in ([101, 102, 103], [104] * 9, [101, 102, 105])]

    def write(form: str) -> Path:
        path = tmp_path / f"sequences.{form}"
        if form == "jsonl":
            path.write_text("".join(json.dumps({"tokens": tokens}) + "\n" for tokens in sequences))
        elif form == "npz":
            np.savez(path, tokens=np.concatenate(sequences), lengths=[len(tokens) for tokens in sequences])
        else:
            pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            parquet.write_table(pyarrow.table({"input_ids": sequences}), path)
        return path

    return write


@pytest.mark.parametrize("form", ["jsonl", "npz", "parquet"])
def test_pack_gives_the_numbers_of_a_file_of_any_form(as_file, form, capsys):
    assert main(["pack", str(as_file(form)), "--row-tokens", "110", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.pop("plan_milliseconds") > 0
    assert len(found.pop("rows")) == 2
    assert found == {
        "sequences": 3,
        "input_tokens": 315,
        "packed_tokens": 215,
        "saved_tokens": 100,
        "token_bound": 215,
        "min_shared_tokens": 64,
        "row_tokens": 110,
        "row_count": 2,
        "row_bound": 2,
        "holes": 5,
    }


def test_pack_without_row_tokens_makes_one_row(as_file, capsys):
    assert main(["pack", str(as_file("jsonl")), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == [{"tokens": 115, "sequence_ids": [0, 1, 2]}]
    assert (found["row_tokens"], found["holes"]) == (None, 0)


def test_pack_counts_the_tokens_and_sequences_of_every_row(as_file, capsys):
    assert main(["pack", str(as_file("jsonl")), "--row-tokens", "110", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert sorted((row["tokens"], len(row["sequence_ids"])) for row in rows) == [(106, 2), (109, 1)]


def test_pack_prints_its_figures_and_the_picture(as_file, capsys):
    assert main(["pack", str(as_file("npz")), "--row-tokens", "110"]) == 0
    text = capsys.readouterr().out
    figures, picture = text.split("\n\n", 1)
    assert [line.split("  ", 1)[1].strip() for line in figures.splitlines()[:-1]] == [
        "2 (at least 2)",
        "315",
        "215 (at least 215)",
        "100 (31.7%)",
        "prefixes of fewer than 64 tokens (--min-shared-tokens)",
        "5 tokens",
    ]
    assert figures.splitlines()[-1].startswith("planned in ")
    assert figures.endswith(" ms")
    assert "tree: 4 segments" in picture
    assert "row 1 " in picture


def test_pack_hands_its_options_to_the_planner(as_file, capsys, monkeypatch):
    from tree_compile import pack

    seen = []

    def plan_rows(sequences, **options):
        seen.append(options)
        return made(sequences, **options)

    made = pack.plan_rows
    monkeypatch.setattr(pack, "plan_rows", plan_rows)
    words = ["--row-tokens", "120", "--min-shared-tokens", "2", "--objective", "tokens", "--plan-seconds", "0.01"]
    assert main(["pack", str(as_file("jsonl")), *words]) == 0
    assert seen == [{"row_tokens": 120, "min_shared_tokens": 2, "objective": "tokens", "plan_seconds": 0.01}]


def test_pack_writes_the_page(as_file, tmp_path, capsys):
    page = tmp_path / "plan.html"
    assert main(["pack", str(as_file("jsonl")), "--row-tokens", "110", "--html", str(page), "--json"]) == 0
    json.loads(capsys.readouterr().out)
    text = page.read_text("utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert "<dt>tokens computed</dt><dd>215</dd>" in text


@pytest.mark.parametrize("option", ["--html", "--save"])
@pytest.mark.parametrize(("name", "why"), [("none/plan", "there is no folder"), (".", "it is a folder")])
def test_pack_refuses_a_place_to_write_before_it_plans(as_file, tmp_path, capsys, monkeypatch, option, name, why):
    monkeypatch.setattr("tree_compile.pack.plan_rows", None)
    assert main(["pack", str(as_file("jsonl")), option, str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / name} cannot be written." in error
    assert why in error
    assert "try: " in error


def test_pack_reads_messages(tmp_path, capsys):
    path = tmp_path / "messages.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    assert main(["pack", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["input_tokens"] == len("\0user\nhi\0")


def test_pack_names_the_wrong_line(as_file, capsys):
    path = as_file("jsonl")
    path.write_text(path.read_text() + '{"tokens": [1, -1]}\n')
    assert main(["pack", str(path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert f"at {path}:4" in output.err


def test_pack_refuses_a_sequence_longer_than_a_row(as_file, capsys):
    assert main(["pack", str(as_file("parquet")), "--row-tokens", "108"]) == 2
    error = capsys.readouterr().err
    assert "Sequence 1 has 109 tokens" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--row-tokens", "0"], "is not a whole number"),
        (["--min-shared-tokens", "0"], "is not a whole number"),
        (["--plan-seconds", "-1"], "is not a number of seconds"),
        (["--plan-seconds", "nan"], "is not a number of seconds"),
        (["--plan-seconds", "soon"], "is not a number of seconds"),
        (["--objective", "speed"], "invalid choice"),
    ],
)
def test_pack_refuses_an_option_out_of_range(words, what, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["pack", "file.jsonl", *words])
    assert what in capsys.readouterr().err


def test_pack_runs_without_torch(as_file):
    code = (
        "import sys\n"
        "from tree_compile.cli import main\n"
        f"main(['pack', {str(as_file('npz'))!r}, '--json'])\n"
        "print('torch' in sys.modules)"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("False\n")
