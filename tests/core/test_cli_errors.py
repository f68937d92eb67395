"""Errors of commands: text on stderr, or an object on stdout with --json. Other words for commands."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runs import dipole, done, refused

from dipole.core.cli import app as cli
from dipole.core.cli.output import asks_for_json
from dipole.core.cli.words import SUGGESTION_FOR, SUGGESTIONS
from dipole.core.utils import plugins
from dipole.core.utils.text import counted
from tests.systems import POSIX

NOT_AN_OPTION = "--no-such-option"
# Wrong arguments of each command, beside its options.
FAILURES = {
    "add": "nothing AP=0.5 --source x", "bench": "no-such-suite", "check": "infonse", "compare": "nothing nothing",
    "completion": "fish", "data": "get no-such-set", "demo": "vision --jobs 2", "doctor": "surplus",
    "embed": "nothing nowhere.txt", "eval": "nothing", "export": "nothing --to onnx", "list": "nothing",
    "new": "import", "play": "nothing", "report": "nowhere", "results": "list nowhere", "rm": "nothing",
    "show": "infonse", "sweep": "no-such-recipe --metric x --space seed=int(0,1)", "theory": "nothing",
    "train": "no-such-recipe",
}  # fmt: skip


@pytest.mark.parametrize("command", cli.names())
def test_a_failure_is_one_object_on_stdout_and_the_text_on_stderr(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments, expected = FAILURES[command].split(), 1 if command in ("report", "results") else 2
    plain = dipole(capsys, command, *arguments)
    assert plain[:2] == (expected, "")
    code, out, err = dipole(capsys, command, *arguments, "--json")
    assert (code, err) == (expected, plain[2])
    (found,) = [json.loads(line) for line in out.splitlines()]
    assert found["error"].keys() == {"type", "message", "exit_code"}
    assert found["error"]["exit_code"] == expected
    assert err.rstrip().endswith(f"error: {found['error']['message']}")


@pytest.mark.parametrize("command", ["no-such-command", *cli.names()])
def test_wrong_usage_is_an_object_too(command, capsys):
    code, out, err = dipole(capsys, command, "--json", NOT_AN_OPTION)
    error = json.loads(out)["error"]
    assert (code, error["exit_code"]) == (2, 2)
    assert error["message"] in err
    assert "usage" not in error["message"]


def test_what_a_command_of_somebody_s_does_is_an_object_too(capsys, monkeypatch):
    """A bug, an interruption, an end by sys.exit with a text and with a number, memory that is refused."""
    refused = RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")
    ends = [
        (ZeroDivisionError("a bug"), 1, "ZeroDivisionError", "DIPOLE_TRACEBACK=1"),
        (KeyboardInterrupt(), 1, "KeyboardInterrupt", ""), (SystemExit("no disk"), 1, "SystemExit", "no disk"),
        (SystemExit(3), 3, "SystemExit", ""), (MemoryError(), 1, "OutOfMemory", "out of memory ("),
        (refused, 1, "OutOfMemory", "you tried to allocate 4096 bytes"),
    ]  # fmt: skip

    def configure(parser: Any) -> Any:
        """Fail."""
        parser.add_argument("which", type=int)
        parser.add_argument("--json", action="store_true")

        def run(arguments: Any) -> int:
            raise ends[arguments.which][0]

        return run

    point = EntryPoint("fails", "failing:configure", "dipole.commands")
    monkeypatch.setitem(sys.modules, "failing", SimpleNamespace(configure=configure))
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == point.group else [])
    for which, (_, expected, kind, said) in enumerate(ends):
        code, out, _ = dipole(capsys, "fails", str(which), "--json")
        error = json.loads(out)["error"]
        assert (code, error["exit_code"], error["type"]) == (expected, expected, kind)
        assert said in error["message"]
        assert error["message"].startswith("out of memory (") == (kind == "OutOfMemory")


# A command line that a stranger could write beside d/, an empty file, a link that leads nowhere, a file that is no
# results file, and run/ -> the message and the exit code.
STRANGERS = {
    ("train", "d"): ("d is a folder: give a .toml file", 2),
    ("train", "gone.toml"): ("gone.toml is a link that leads nowhere", 2),
    ("train", "pipe.toml"): ("pipe.toml is no regular file", 2),
    ("bench", "d"): ("d is a folder: give a suite file", 2),
    ("bench", "demo", "--slurm", "time=1"): ("--slurm time=1 belongs to --engine slurm", 2),
    ("bench", "demo", "--slurm", "time=1", "--plan"): ("--slurm time=1 belongs to --engine slurm", 2),
    ("list", "runs", "--runs", "nowhere"): ("--runs nowhere: no such folder", 2),
    ("list", "runs", "--runs", "empty.txt"): ("--runs empty.txt: it is a file", 2),
    ("check", "infonce", "--engine", "nothing"): ("'nothing' names no engine; there are dense, eager, triton", 1),
    ("report", "run"): ("run is one run. Give its parent folder, ..", 1),
    ("report", "d", "-o", "empty.txt/x.html"): ("choose another folder with -o", 1),
    ("report", "bad.jsonl"): ("nothing could be read: `Problems` in report.html says why", 1),
}


@pytest.mark.parametrize("arguments", STRANGERS, ids=" ".join)
def test_a_stranger_is_told_what_is_wrong_where_and_what_to_do(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("d", "run"):
        Path(name).mkdir()
    Path("run/record.json").write_text("{}")
    Path("empty.txt").touch()
    Path("bad.jsonl").write_bytes(b"\xb7\x00\n")
    if {"gone.toml", "pipe.toml"} & set(arguments):
        if POSIX:
            Path("gone.toml").symlink_to("nowhere")
            os.mkfifo("pipe.toml")
        else:
            pytest.skip("no pipes in folders")
    words, expected = STRANGERS[arguments]
    err = refused(capsys, *arguments, code=expected)
    assert words in err
    assert "--runs" not in err or "--runs" in arguments


def test_a_process_that_fails_prints_one_line_of_json(tmp_path):
    command = [sys.executable, "-m", "dipole", "rm", "no-such-run", "--yes", "--json"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    message = json.loads(found.stdout)["error"]["message"]
    assert message.split() == found.stderr.removeprefix("error: ").split()  # lines fit the terminal


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [("x --json", True), ("x --js", True), ("x -- --json", False), ("x --jobs 2", False), ("x json", False)],
)
def test_json_is_asked_for_as_argparse_reads_it(arguments, asked):
    assert asks_for_json(arguments.split()) is asked


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--json list", "the command comes first: dipole list --json"),
        ("--verison", "unknown option '--verison'. Did you mean '--version'?"),
        ("TRAIN x", "Did you mean 'train'?"),
        ("list recipe", "invalid choice: 'recipe'. Did you mean 'recipes'?"),
        ("data lst", "invalid choice: 'lst'. Did you mean 'list'?"),
        ("rm x --fore", "unrecognized arguments: --fore. Did you mean '--force'?"),
        ("train x --epochs 5", "A setting is given by --set train.epochs=5"),
        ("bench x --learning-rte=1e-3", "A setting is given by --set train.learning_rate=1e-3"),
        ("train x --sed 5", "Did you mean '--seed'?"),
        ("show simcrl", "Did you mean 'simclr'?"),
        ("show digits-simcler", "Did you mean 'digits-simclr'?"),
        ("show lmlc-table4", "Did you mean 'lmcl-table4'?"),
        ("show uniformty", "Did you mean 'uniformity'?"),
        ("", "usage: dipole"),
        ("train", "required: RECIPE"),
        ("train nothing", "unknown recipe 'nothing'"),
        ("train infonce", "It is an objective: dipole train RECIPE --set objective=infonce."),
        ("sweep dp --metric x --space seed=int(0,1)", "--set 'objective=infonce + dp'."),
        ("train lmcl-table4", "It is a suite: dipole bench lmcl-table4."),
        ("bench digits-simclr", "It is a recipe: dipole train digits-simclr."),
        ("train digits-simclr --set train.steps", "not of the form key=value"),
        ("train digits-simclr --seed x", "invalid int value"),
        ("train digits-simclr --set objective=infonce(temprature=1)", "temperature"),
        ("eval 0123", "no run '0123'"),
        ("eval .", "is no run folder"),
        ("export x --to text", "no run 'x'"),
        ("check", "give either TARGET or --all"),
    ],
)
def test_wrong_usage_is_answered_with_what_is_right(line, words, capsys):
    assert words in refused(capsys, *line.split())


def test_help_and_version_are_asked_for_in_several_ways(capsys):
    assert dipole(capsys, "help", "train") == dipole(capsys, "train", "--help")
    assert json.loads(dipole(capsys, "--version", "--json")[1]) == {"dipole": cli.__version__}
    assert re.search("exit codes: 0 .*, 1 .*, 2 .*, 75 .*", dipole(capsys, "--help")[1])


@pytest.mark.parametrize("word", ["resume", "evaluate", "run", "test", "ls", "Delete"])
def test_other_words_for_a_command_are_answered_with_it(word, capsys):
    err = refused(capsys, word, "3f2a")
    assert f"unknown command {word!r}. {SUGGESTION_FOR[word.lower()]}. Commands: add, " in err
    assert "Did you mean" not in err


def test_other_words_lead_to_commands_that_parse():
    words = [word for words in SUGGESTIONS.values() for word in words]
    assert len(words) == len(set(words))
    assert not set(words) & set(cli.names())
    parsers = {name: cli.Parser(prog=name) for name in cli.names()}
    for name, parser in parsers.items():
        cli._find(name)(parser)
    for cure in SUGGESTIONS:
        for command, rest in re.findall(r"dipole ([a-z]+)([^;`]*)", cure.replace("`dipole train ...`", "")):
            parsers[command].parse_args(rest.split())


def test_a_run_s_folder_is_no_recipe_but_its_configuration_is(blobs, capsys):
    assert dipole(capsys, "train", str(blobs), "--quiet")[0] == 0
    (folder,) = Path("runs").iterdir()
    assert f"dipole train {folder}/config.toml" in refused(capsys, "train", str(folder))
    out = done(capsys, "train", f"{folder}/config.toml", "--json")
    assert json.loads(out)["already"] is True
    assert Path(json.loads(out)["run"]) == folder


@pytest.mark.parametrize(
    ("count", "words", "text"),
    [
        (1, ("run",), "1 run"), (0, ("run",), "0 runs"), (2, ("class", "classes"), "2 classes"),
        (1, ("class", "classes"), "1 class"), (1.0, ("epoch",), "1 epoch"), (0.5, ("epoch",), "0.5 epochs"),
    ],
)  # fmt: skip
def test_one_is_no_plural(count, words, text):
    assert counted(count, *words) == text
