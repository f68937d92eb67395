"""Errors of commands, as text and as JSON. Streams without a reader, full, closed or in another encoding. Questions."""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from runs import dipole, done, refused, told

from dipole.core.cli import app as cli
from dipole.core.cli import main
from dipole.core.cli.output import asks_for_json
from dipole.core.cli.parser import WORDS, resumable
from dipole.core.record import read_record
from dipole.core.utils.text import counted, size
from tests.systems import POSIX

# Wrong arguments of each command, beside its options.
FAILURES = {
    "add": "nothing AP=0.5 --source x", "bench": "no-such-suite", "check": "infonse", "compare": "nothing nothing",
    "completion": "fish", "data": "get no-such-set", "demo": "vision --jobs 2", "doctor": "surplus",
    "embed": "nothing nowhere.txt", "eval": "nothing", "export": "nothing --to onnx", "list": "nothing",
    "new": "import", "play": "nothing", "report": "nowhere", "results": "list nowhere", "rm": "nothing",
    "show": "infonse", "sweep": "no-such-recipe --metric x --space seed=int(0,1)", "theory": "nothing",
    "train": "no-such-recipe",
}  # fmt: skip
REFUSED = RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")
needs_shell = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a POSIX shell and /dev/full")
BUFFERED = ({}, {"PYTHONUNBUFFERED": "1"})  # standard streams
# A command line that a stranger could write beside d/, an empty file, a link that leads nowhere, a file that is no
# results file, and run/ -> the message and the exit code.
STRANGERS = {
    ("train", "d"): ("d is a folder: give a .toml file", 2),
    ("train", ""): ("unknown recipe ''", 2),
    ("add", "run", "AP=1", "--source", " "): ("--source is empty", 2),
    ("data", "get", "imagenet"): ("registered users of https://image-net.org", 2),
    ("rm", ""): ("the path of its folder or the first digits of its hash, got ''", 2),
    ("train", "my"): ("unknown recipe 'my'. Did you mean the file my.toml?", 2),
    ("train", "gone.toml"): ("gone.toml is a link that leads nowhere", 2),
    ("train", "pipe.toml"): ("pipe.toml is no regular file", 2),
    ("bench", "d"): ("d is a folder: give a suite file", 2),
    ("bench", "demo", "--slurm", "time=1", "--plan"): ("--slurm time=1 belongs to --engine slurm", 2),
    ("list", "runs", "--runs", "nowhere"): ("--runs nowhere: no such folder", 2),
    ("list", "runs", "--runs", "my.toml"): ("--runs my.toml: it is a file", 2),
    ("list", "runs", "--runs", "run"): ("--runs run: it is the folder of one run", 2),
    ("train", "lmcl-toy", "--log", ""): ("--log: unknown tracker ''", 2),
    ("check", "json:dumps", "--option", "x="): ("--option 'x=' is not of the form key=value", 2),
    ("check", "infonce", "--engine", "nothing"): ("'nothing' names no engine; there are dense, eager, triton", 1),
    ("report", "run"): ("run is one run. Give its parent folder, ..", 2),
    ("report", "d", "-o", "my.toml/x.html"): ("choose another folder with -o", 1),
    ("theory", "--figure1", "my.toml/x.svg"): ("remove it, or choose another folder with --figure1", 2),
    ("show", "a1b2"): ("unknown name 'a1b2'. It is a run: `dipole show runs/a1b2/config.toml` shows", 2),
    ("show", "bad.toml"): ("bad.toml is not valid TOML: ", 1),
    ("report", "bad.jsonl"): ("nothing could be read: `Problems` in report.html says why", 1),
}


@pytest.mark.parametrize("command", cli.names())
def test_a_failure_is_one_object_on_stdout_and_the_text_on_stderr(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = FAILURES[command].split()
    plain = dipole(capsys, command, *arguments)
    assert plain[:2] == (2, "")
    code, out, err = dipole(capsys, command, *arguments, "--json")
    assert (code, err) == (2, plain[2])
    (found,) = [json.loads(line) for line in out.splitlines()]
    assert found["error"].keys() == {"type", "message", "exit_code"}
    assert found["error"]["exit_code"] == 2
    assert err.rstrip().endswith(f"error: {found['error']['message']}")


@pytest.mark.parametrize("command", ["no-such-command", *cli.names()])
def test_wrong_usage_is_an_object_too(command, capsys):
    code, out, err = dipole(capsys, command, "--json", "--no-such-option")
    error = json.loads(out)["error"]
    assert (code, error["exit_code"]) == (2, 2)
    assert error["message"] in err
    assert "usage" not in error["message"]


@pytest.mark.parametrize(("end", "expected", "kind", "said"), [
    (ZeroDivisionError("a bug"), 1, "ZeroDivisionError", "DIPOLE_TRACEBACK=1"),
    (KeyboardInterrupt(), 1, "KeyboardInterrupt", ""), (SystemExit("no disk"), 1, "SystemExit", "no disk"),
    (SystemExit(3), 3, "SystemExit", ""), (MemoryError(), 1, "OutOfMemory", "out of memory ("),
    (REFUSED, 1, "OutOfMemory", "you tried to allocate 4096 bytes"),
])  # fmt: skip
def test_what_ends_a_command_is_an_object_too(end, expected, kind, said, capsys, command_of_a_package, monkeypatch):
    def configure(parser: Any) -> Any:
        """Fail."""

        def run(arguments: Any) -> int:
            raise end

        parser.add_argument("--json", action="store_true")
        return run

    command_of_a_package("fails", configure)
    code, out, _ = dipole(capsys, "fails", "--json")
    error = json.loads(out)["error"]
    assert (code, error["exit_code"], error["type"]) == (expected, expected, kind)
    assert said in error["message"]
    assert error["message"].startswith("out of memory (") == (kind == "OutOfMemory")
    if "TRACEBACK" in said:
        assert "ZeroDivisionError: a bug" in refused(capsys, "fails", code=1)
        monkeypatch.setenv("DIPOLE_TRACEBACK", "1")
        with pytest.raises(ZeroDivisionError):
            main(["fails"])


@pytest.mark.parametrize("arguments", STRANGERS, ids=" ".join)
def test_a_stranger_is_told_what_is_wrong_where_and_what_to_do(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("d", "run", "runs/a1b2"):
        Path(name).mkdir(parents=True)
    Path("runs/a1b2/config.toml").touch()
    Path("run/record.json").write_text("{}")
    Path("my.toml").touch()
    Path("bad.toml").write_text("dp")
    Path("bad.jsonl").write_bytes(b"\xb7\x00\n")
    if POSIX:
        Path("gone.toml").symlink_to("nowhere")
        os.mkfifo("pipe.toml")
    elif {"gone.toml", "pipe.toml"} & set(arguments):
        pytest.skip("no pipes in folders")
    words, expected = STRANGERS[arguments]
    err = refused(capsys, *arguments, code=expected)
    assert words in err
    assert "--runs" not in err or "--runs" in arguments


def test_json_is_asked_for_as_argparse_reads_it():
    for line in ("x --json", "x --js", "x -- --json", "x --jobs 2", "x json"):
        assert asks_for_json(line.split()) is (line in ("x --json", "x --js")), line


@pytest.mark.parametrize(("line", "words"), [
    ("--json list", "the command comes first: dipole list --json"),
    ("--runs x list", "the command comes first: dipole list --runs x"),
    ("data CIFAR10 --yes", "Did you mean `dipole data get cifar10`?"), ("data get CIFAR-10", "Did you mean 'cifar10'?"),
    ("--verison", "unknown option '--verison'. Did you mean '--version'?"), ("TRAIN x", "Did you mean 'train'?"),
    ("list recipe", "'recipe'. Did you mean 'recipes'?"), ("data lst", "'lst'. Did you mean 'list'?"),
    ("rm x --fore", "--fore. Did you mean '--force'?"), ("bench x paper", "Did you mean '--scale paper'?"),
    ("train x --epochs 5", "A setting is given by --set train.epochs=5"), ("eval .", "is no run folder"),
    ("bench x --learning-rte=1e-3", "A setting is given by --set train.learning_rate=1e-3"),
    ("train x seed=5 b=c", "A setting is given by --set seed=5 b=c"), ("show train.epochs", "Did you mean 'train'?"),
    ("train digits-simclr --set device=gpu", "'gpu' is not allowed. Allowed: auto, cpu, cuda,"),
    ("train digits-simclr --set lr=1", "did you mean train.learning_rate?"), ("check a/b.py:A", "as module:Class"),
    ("train digits-simclr --set train.wd=1", "Did you mean 'weight_decay'?"), ("check b.A", "as module:Class"),
    ("train x --sed 5", "Did you mean '--seed'?"), ("show simcrl", "Did you mean 'simclr'?"),
    ("show digits-simcler", "Did you mean 'digits-simclr'?"), ("show lmlc-table4", "Did you mean 'lmcl-table4'?"),
    ("show uniformty", "Did you mean 'uniformity'?"), ("show dmoain", "Did you mean 'domain'?"),
    ("show domain", "`dipole list domains` shows"), ("show trian", "Did you mean 'train'?"),
    ("", "usage: dipole"), ("train", "required: RECIPE"), ("train nothing", "unknown recipe 'nothing'"),
    ("train infonce", "It is an objective: dipole train RECIPE --set objective=infonce."),
    ("sweep dp --metric x --space seed=int(0,1)", "--set 'objective=infonce + dp'."),
    ("train lmcl-table4", "It is a suite: dipole bench lmcl-table4."),
    ("bench digits-simclr", "It is a recipe: dipole train digits-simclr."), ("check", "TARGET or --all"),
    ("train digits-simclr --set train.steps", "of the form key=value"), ("train x --seed x", "invalid int value"),
    ("train digits-simclr --set objective=infonce(temprature=1)", "temperature"), ("eval 0123", "no run '0123'"),
    ("export x --to text", "no run 'x'"),
])  # fmt: skip
def test_wrong_usage_is_answered_with_what_is_right(line, words, capsys):
    assert words in refused(capsys, *line.split())


def test_help_and_version_are_asked_for_in_several_ways(capsys):
    assert dipole(capsys, "help", "train") == dipole(capsys, "train", "--help")
    assert json.loads(dipole(capsys, "--version", "--json")[1]) == {"dipole": cli.__version__}
    assert re.search("exit codes: 0 .*, 1 .*, 2 .*, 75 .*", dipole(capsys, "--help")[1])


def test_other_words_for_a_command_are_answered_with_commands_that_parse(capsys):
    answers = {word: answer for answer, words in WORDS["suggestions"].items() for word in words}
    for word in ("resume", "evaluate", "run", "test", "ls", "Delete"):
        said = f"unknown command {word!r}. {answers[word.lower()]}. Commands: add, "
        assert said in refused(capsys, word, "3f2a")  # and nothing that is spelt alike
    assert len(answers) == sum(map(len, WORDS["suggestions"].values()))
    assert not answers.keys() & set(cli.names())
    parsers = {name: cli.Parser(prog=name) for name in cli.names()}
    for name, parser in parsers.items():
        cli._find(name)(parser)
    for cure in WORDS["suggestions"]:
        for command, rest in re.findall(r"dipole ([a-z]+)([^;`]*)", cure.replace("`dipole train ...`", "")):
            parsers[command].parse_args(rest.split())


def test_a_run_s_folder_is_no_recipe_but_its_configuration_is(one_run, capsys):
    assert f"dipole train {one_run}/config.toml" in refused(capsys, "train", one_run)
    answer = told(capsys, "train", f"{one_run}/config.toml")
    assert (answer["already"], Path(answer["run"])) == (True, one_run)


def test_numbers_of_a_message_are_rounded_and_one_is_no_plural():
    assert [size(count) for count in (999, 999_600, 2e12)] == ["999 B", "1 MB", "2,000.0 GB"]
    assert [counted(count, "run") for count in (1, 0, 1.0, 0.5)] == ["1 run", "0 runs", "1 run", "0.5 runs"]
    assert [counted(count, "class", "classes") for count in (1, 2)] == ["1 class", "2 classes"]


def shell(command: str, folder: Path, program: str = "-m dipole", **environment: str) -> Any:
    """Run a line of bash in which `dipole` is this package."""
    given = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | environment
    function = f'dipole() {{ {shlex.quote(sys.executable)} {program} "$@"; }}\n'
    line = ["bash", "-o", "pipefail", "-c", function + command]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False, env=given, timeout=300)


@needs_shell
@pytest.mark.parametrize("buffered", BUFFERED)
@pytest.mark.parametrize(("target", "commands", "said"), [
    ("> /dev/full", ("--help", "list recipes"), "The disk is full"),
    (">&-", ("--help", "list recipes"), "stdout is closed"), ("| true", ("--version", "list runs --json"), ""),
])  # fmt: skip
def test_what_stdout_does_not_take_is_one_message_and_1(target, commands, said, buffered, tmp_path):
    found = shell(f"dipole {commands[len(buffered)]} {target}", tmp_path, **buffered)
    lines = found.stderr.splitlines()
    assert (found.returncode, len(lines)) == (1, bool(said)), lines
    assert all(line.startswith("error: cannot write the output: ") and said in line for line in lines)


@needs_shell
@pytest.mark.parametrize(("target", "buffered"), [
    ("| true", BUFFERED[0]), ("> /dev/full", BUFFERED[1]), (">&-", BUFFERED[0]), (">&- 2>&-", BUFFERED[1]),
    ("> /dev/full 2>&1", BUFFERED[0]),
])  # fmt: skip
def test_an_error_keeps_its_exit_code_without_stdout(target, buffered, tmp_path):
    found = shell(f"dipole list nothing --json {target}", tmp_path, **buffered)
    assert (found.returncode, found.stdout) == (2, "")
    assert ("dipole list: error: argument KIND: invalid choice" in found.stderr) is ("2>" not in target)
    assert "Traceback" not in found.stderr


@needs_shell
@pytest.mark.slow  # as the next
@pytest.mark.parametrize("target", ["<&- 2>/dev/full", "2>&-", "2>&1 >&- | true"])
def test_training_finishes_without_a_working_stream(target, blobs, tmp_path):
    found = shell(f"dipole train {blobs} {target}", tmp_path, shlex.quote(f"{Path(__file__).parent}/blobs_domain.py"))
    (folder,) = (tmp_path / "runs").iterdir()
    assert read_record(folder / "record.json").status == "done"  # with the result that cannot be printed
    lost = ">&- |" in target
    assert (found.returncode, "objective  infonce" in found.stdout) == (int(lost), not lost)
    assert "Traceback" not in found.stderr + found.stdout


@needs_shell
def test_training_finishes_without_streams(blobs, monkeypatch):
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        for name, stream in (("stdin", None), ("stdout", None), ("stderr", full)):
            patch.setattr(sys, name, stream)
        codes = [main(["train", str(blobs), *more]) for more in ([], ["--quiet"])]  # the second finds the run
        full.flush()
    assert (codes, read_record(next(Path("runs").glob("*/record.json"))).status) == ([1, 1], "done")


@needs_shell
def test_files_do_not_replace_a_closed_stream(tmp_path):
    """Without stdout, the first file that is opened would get its number, and children would print into it."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nfrom dipole.core.cli import output\noutput.prepare()\n"
        "file = open('kept.txt', 'w')\nos.system('echo from a child')\nfile.write('mine')\n"
    )
    for closed in (">&-", "<&- >&-", "<&- >&- 2>&-"):
        assert shell(f"{shlex.quote(sys.executable)} script.py {closed}", tmp_path).returncode == 0
        assert (tmp_path / "kept.txt").read_text() == "mine"


@needs_shell
def test_characters_outside_the_encoding_are_escaped(blobs, tmp_path):
    name = "\N{GREEK SMALL LETTER LAMDA}-\N{SNOWMAN}"
    assert main(["train", str(blobs), "--quiet", "--set", f"name={name}"]) == 0
    for encoding in ("latin-1", "ascii:strict"):
        found = shell("dipole list runs; dipole rm nothing-$'\\u2603'", tmp_path, PYTHONIOENCODING=encoding)
        assert "\\u03bb-\\u2603" in found.stdout
        assert ("\\u2603" in found.stderr, "Unicode" in found.stderr) == (True, False)


@needs_shell
def test_a_closed_stdin_is_not_asked(one_run, tmp_path):
    for command in (f"rm {one_run.name}", "data get cifar10"):
        found = shell(f"dipole {command} <&-", tmp_path)
        assert (found.returncode, "not interactive: add --yes" in found.stderr) == (2, True)
    assert one_run.is_dir()


class Terminal(io.StringIO):  # A user who types, or presses Ctrl-C if there is nothing to type
    isatty = lambda self: True  # noqa: E731

    def readline(self, *given: int) -> str:  # type: ignore[override]
        if self.getvalue() == "^C":
            raise KeyboardInterrupt
        return super().readline(*given)


def test_any_answer_but_yes_removes_nothing(one_run, capsys, monkeypatch):
    for typed in ("n\n", "\n", "", "y es\n", "^C"):
        monkeypatch.setattr(sys, "stdin", Terminal(typed))
        code, out, err = dipole(capsys, "rm", one_run.name)
        assert (code, out, one_run.is_dir()) == (1, "", True)
        assert re.fullmatch(r"(?s)(?!.*Repeat).*Remove 1 run\? \[y/N\] .*nothing was removed\.\n", err)
    monkeypatch.setattr(sys, "stdin", Terminal("Yes\n"))
    done(capsys, "rm", one_run.name)
    assert not one_run.exists()


def test_ctrl_c_says_how_to_continue_if_possible(capsys, monkeypatch):
    def stopped(_: object) -> int:
        raise KeyboardInterrupt

    more = " Repeat the command to continue: finished runs and checkpoints are kept."
    for run, expected in ((stopped, ""), (resumable(stopped), more)):
        monkeypatch.setattr(cli, "_find", lambda name, run=run: lambda parser: run)
        assert main(["list"]) == 1
        assert capsys.readouterr() == ("", f"interrupted.{expected}\n")


def test_lines_of_both_streams_keep_their_order_in_a_pipe(monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    script = "import sys; from dipole.core.cli.output import write; write('one'); write('two', sys.stderr)"
    found = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
    assert found.stdout.split() == [b"one", b"two"]


@pytest.mark.skipif(sys.platform == "win32", reason="signals are for others")
def test_ctrl_c_during_imports_is_one_line(tmp_path):
    script = (
        "import sys, time\nfrom dipole.core.cli import main\n"
        "class Slow:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'dipole.core.cli.app':\n"
        "            print('importing', flush=True)\n"
        "            time.sleep(60)\n"
        "sys.meta_path.insert(0, Slow())\nsys.exit(main(['list']))\n"
    )
    command, pipe = [sys.executable, "-c", script], subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "importing\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (1, "interrupted.\n")
