"""Streams of a shell: without a reader, on a full disk, closed, or in another encoding. Questions to the user."""

import io
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import dipole, done

from dipole.core.cli import app as cli
from dipole.core.cli import main
from dipole.core.cli.output import DeclinedError, confirm
from dipole.core.cli.parser import resumable
from dipole.core.record import read_record
from dipole.core.utils.errors import ConfigError

HERE = Path(__file__).parent
FULL = Path("/dev/full")
needs_shell = pytest.mark.skipif(not FULL.exists(), reason="needs a POSIX shell and /dev/full")
# With and without buffering.
BUFFERED = ({}, {"PYTHONUNBUFFERED": "1"})


def shell(
    command: str, folder: Path, program: str = "-m dipole", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which `dipole` is this package."""
    given = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | environment
    function = f'dipole() {{ {shlex.quote(sys.executable)} {program} "$@"; }}\n'
    line = ["bash", "-o", "pipefail", "-c", function + command]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False, env=given, timeout=300)


@needs_shell
@pytest.mark.parametrize(
    ("command", "target", "said", "buffered"),
    [
        *(
            (name, "> /dev/full", "The disk is full", each)
            for name, each in zip(["--help", "list recipes"], BUFFERED, strict=True)
        ),
        *(
            (name, ">&-", "stdout is closed", each)
            for name, each in zip(["--help", "list recipes"], BUFFERED, strict=True)
        ),
        *((name, "| true", "", each) for name, each in zip(["--version", "list runs --json"], BUFFERED, strict=True)),
    ],
)
def test_what_stdout_does_not_take_is_one_message_and_1(command, target, said, buffered, tmp_path):
    found = shell(f"dipole {command} {target}", tmp_path, **buffered)
    assert found.returncode == 1, found.stderr
    lines = found.stderr.splitlines()
    assert len(lines) == bool(said)
    assert all(line.startswith("error: cannot write the output: ") and said in line for line in lines)


@needs_shell
@pytest.mark.parametrize(
    ("target", "buffered"),
    [("| true", BUFFERED[0]), ("> /dev/full", BUFFERED[1]), (">&-", BUFFERED[0]), (">&- 2>&-", BUFFERED[1]),
     ("> /dev/full 2>&1", BUFFERED[0])],
)  # fmt: skip
def test_an_error_keeps_its_exit_code_without_stdout(target, buffered, tmp_path):
    found = shell(f"dipole list nothing --json {target}", tmp_path, **buffered)
    assert (found.returncode, found.stdout) == (2, "")
    assert ("dipole list: error: argument KIND: invalid choice" in found.stderr) is ("2>" not in target)
    assert "Traceback" not in found.stderr


@needs_shell
@pytest.mark.parametrize(
    "target", [pytest.param("2>&-", marks=pytest.mark.slow), "<&- 2> /dev/full", "2>&1 >&- | true"]
)
def test_training_finishes_without_a_working_stream(target, blobs, tmp_path):
    found = shell(f"dipole train {blobs} {target}", tmp_path, program=shlex.quote(str(HERE / "blobs_domain.py")))
    (folder,) = (tmp_path / "runs").iterdir()
    assert read_record(folder / "record.json").status == "done"  # with the result that cannot be printed
    lost = ">&- |" in target
    assert found.returncode == int(lost)
    assert ("objective  infonce" in found.stdout) is not lost
    assert "Traceback" not in found.stderr + found.stdout


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
@pytest.mark.parametrize("encoding", ["latin-1", "ascii:strict"])
def test_characters_outside_the_encoding_are_escaped(encoding, blobs, tmp_path):
    name = "\N{GREEK SMALL LETTER LAMDA}-\N{SNOWMAN}"
    assert main(["train", str(blobs), "--quiet", "--set", f"name={name}"]) == 0
    found = shell("dipole list runs; dipole rm nothing-$'\\u2603'", tmp_path, PYTHONIOENCODING=encoding)
    assert "\\u03bb-\\u2603" in found.stdout
    assert "\\u2603" in found.stderr
    assert "Unicode" not in found.stderr


@needs_shell
@pytest.mark.parametrize("command", ["rm {run}", "data get cifar10"])
def test_a_closed_stdin_is_not_asked(command, blobs, tmp_path):
    assert main(["train", str(blobs), "--quiet"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    found = shell(f"dipole {command.format(run=folder.name)} <&-", tmp_path)
    assert found.returncode == 2
    assert "not interactive: add --yes" in found.stderr
    assert folder.is_dir()


class Terminal(io.StringIO):
    """A user who types, or presses Ctrl-C if there is nothing to type."""

    def isatty(self) -> bool:
        return True

    def readline(self, *given: int) -> str:  # type: ignore[override]
        if self.getvalue() == "^C":
            raise KeyboardInterrupt
        return super().readline(*given)


@pytest.mark.parametrize("typed", ["n\n", "\n", "", "y es\n", "^C"])
def test_any_answer_but_yes_removes_nothing(typed, blobs, capsys, monkeypatch):
    done(capsys, "train", blobs, "--quiet")
    (folder,) = Path("runs").iterdir()
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    code, out, err = dipole(capsys, "rm", folder.name)
    assert (code, out) == (1, "")
    assert err.endswith("nothing was removed.\n")
    assert "Repeat" not in err
    assert folder.is_dir()
    monkeypatch.setattr(sys, "stdin", Terminal("Yes\n"))
    done(capsys, "rm", folder.name)
    assert not folder.exists()


def test_a_question_is_asked_on_stderr(capsys, monkeypatch):
    question = "Fetch it?", "to fetch it", "nothing was fetched"
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    confirm(*question)
    assert capsys.readouterr() == ("", "Fetch it? [y/N] ")
    for stdin, error, said in (
        (Terminal(""), DeclinedError, r"^nothing was fetched\.$"),
        (io.StringIO("y\n"), ConfigError, "add --yes to fetch it"),
    ):
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(error, match=said):
            confirm(*question)


def test_ctrl_c_says_how_to_continue_if_possible(capsys, monkeypatch):
    def stopped(_: object) -> int:
        raise KeyboardInterrupt

    for run, expected in (
        (stopped, "interrupted.\n"),
        (resumable(stopped), "interrupted. Repeat the command to continue: finished runs and checkpoints are kept.\n"),
    ):
        monkeypatch.setattr(cli, "_find", lambda name, run=run: lambda parser: run)
        assert main(["list"]) == 1
        assert capsys.readouterr() == ("", expected)


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
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (1, "interrupted.\n")
