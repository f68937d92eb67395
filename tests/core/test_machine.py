"""What the machine is and has, against the tools of the system; and what another system lacks is asked for by name."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dipole.benchmarks.run import worker
from dipole.core.ground import machine

ROOT = Path(__file__).parents[2]
# Modules of the standard library that Windows has not.
POSIX = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}


def test_the_peak_is_what_was_held_and_not_what_is():
    code = (
        "from dipole.core.ground.machine import peak_memory as peak; before = peak(); "
        "held = bytearray(300 << 20); held[::4096] = b'x' * len(held[::4096]); del held; print(peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 290 << 20 < int(done.stdout) < 400 << 20


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_processors_are_those_that_may_be_used():
    code = (
        "import os; from dipole.core.ground.machine import processors; "
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(processors())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="Linux alone says so there")
def test_free_memory_is_at_most_what_the_system_says():
    line = next(each for each in Path("/proc/meminfo").read_text().splitlines() if each.startswith("MemAvailable:"))
    assert 0 < machine.free_memory() < 1.1 * 1024 * int(line.split()[1])


def test_a_system_without_posix_imports_everything_and_trains(tmp_path):
    pytest.importorskip("PIL")
    program = Path(__file__).with_name("without_posix.py")
    done = subprocess.run([sys.executable, program, tmp_path], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("every module\n"), done.stdout + done.stderr
    assert done.stdout.endswith("codes 0 0 0 0\n"), done.stdout + done.stderr


@pytest.mark.skipif(os.name == "nt", reason="what Windows does, acted out elsewhere")
def test_a_worker_follows_its_runner_where_parents_do_not_change(monkeypatch):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as runner:
        with monkeypatch.context() as patch:
            patch.setattr(worker.os, "name", "nt")
            lives, gone = worker._life_of(runner.pid), worker._life_of(2**22 + 1)
        assert lives()
        assert not gone()
        runner.communicate(b"\n")
    assert not lives()


def test_nothing_that_windows_lacks_is_imported_at_the_top_of_a_module():
    found = []
    for folder in ("core", "vision", "text", "rl", "benchmarks", "dipole"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.parse(file.read_text()).body:
                names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                found += [(file.name, name) for name in names if name.partition(".")[0] in POSIX]
    assert not found
