"""Facts about the machine equal those of the system's tools. Tests mark features that Windows lacks."""

import ast
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dipole.benchmarks.run import worker
from dipole.core.utils import machine, process
from tests.core.without_posix import MODULES, OF_OS, OF_SIGNAL
from tests.systems import POSIX, posix

ROOT = Path(__file__).parents[2]
# Names that only POSIX has, in programs that tests write as text.
IN_TEXT = re.compile(
    r"\bimport[^\n]*\bresource\b|signal\.SIG(KILL|USR|ALRM|HUP)|os\.(kill|killpg|fork|mkfifo)\(|get_context\(.fork"
)


def test_the_peak_is_what_was_held_and_not_what_is():
    code = (
        "from dipole.core.utils.machine import peak_memory as peak; before = peak(); "
        "held = bytearray(300 << 20); held[::4096] = b'x' * len(held[::4096]); del held; print(peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 290 << 20 < int(done.stdout) < 400 << 20


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_processors_are_those_that_may_be_used():
    code = (
        "import os; from dipole.core.utils.machine import processors; "
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(processors())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="only Linux has this file")
def test_free_memory_is_at_most_what_the_system_says():
    line = next(each for each in Path("/proc/meminfo").read_text().splitlines() if each.startswith("MemAvailable:"))
    assert 0 < machine.free_memory() < 1.1 * 1024 * int(line.split()[1])


@pytest.mark.slow
def test_a_system_without_posix_imports_everything_trains_and_finds_every_test(tmp_path):
    """On Windows a module of tests that cannot be imported stops the whole run."""
    pytest.importorskip("PIL")
    program = Path(__file__).with_name("without_posix.py")
    done = subprocess.run([sys.executable, program, tmp_path], capture_output=True, text=True, check=False)
    said = done.stdout[-5000:] + done.stderr
    assert done.stdout.startswith("every module\n"), said
    assert "\ncodes 0 0 0 0\n" in done.stdout, said
    assert done.returncode == 0, said
    assert len(re.findall(r"^tests/\S+\.py: \d+$", done.stdout, re.MULTILINE)) > 100


def test_a_number_that_another_process_has_now_is_told_without_proc(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "PROCESSES", tmp_path)
    own = json.loads(process.describe_self())
    assert float(own["began"]) == pytest.approx(psutil.Process().create_time(), abs=0.1)
    assert not process.is_gone(json.dumps(own))
    assert not process.is_gone(json.dumps(own | {"began": f"{float(own['began']) + 5:.2f}"}))  # the clock was set
    assert process.is_gone(json.dumps(own | {"began": f"{float(own['began']) - 3600:.2f}"}))
    assert not process.is_gone(json.dumps(own | {"began": ""}))  # the system did not tell: it may be
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        told = json.dumps(own | {"pid": other.pid, "began": f"{psutil.Process(other.pid).create_time():.2f}"})
        assert not process.is_gone(told)
        other.stdin.close()
        if POSIX:
            while psutil.Process(other.pid).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
            assert process.is_gone(told)  # its exit code is still unread
    assert process.is_gone(told)


@posix  # what Windows does, acted out elsewhere
def test_a_worker_follows_its_runner_where_parents_do_not_change(monkeypatch):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as runner:
        with monkeypatch.context() as patch:
            patch.setattr(worker.os, "name", "nt")
            lives, gone = worker._life_of(runner.pid), worker._life_of(2**22 + 1)
        assert lives()
        assert not gone()
        runner.communicate(b"\n")
    assert not lives()


def test_nothing_that_windows_lacks_is_used_without_a_mark():
    """No module imports it at the top, and tests use it only with a mark."""
    top, inside = [], {}
    for folder in ("core", "vision", "text", "rl", "benchmarks", "dipole", "tests", "docs", "examples"):
        for file in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            for node in tree.body:
                top += [(file.name, name) for name in imported(node) if name.partition(".")[0] in MODULES]
            if folder == "tests" and file.name not in ("systems.py", "without_posix.py", "test_machine.py"):
                inside[file.name] = lacking(tree)
    assert not top
    assert not {name: names for name, names in inside.items() if names}


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def lacking(node: ast.AST) -> list[str]:
    """Return the features that a piece of a test uses without a mark, and that Windows lacks."""
    if isinstance(node, ast.If | ast.IfExp) and re.search(r"\bPOSIX\b|hasattr", ast.unparse(node.test)):
        return []
    if isinstance(node, ast.Call) and any("posix" in ast.unparse(each) for each in node.keywords):  # pytest.param
        return []
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        said = " ".join(map(ast.unparse, node.decorator_list))
        if re.search(r"\b(posix|linux|which)\b|hasattr", said.partition("parametrize")[0]):
            return []
    found = [name for name in imported(node) if name.partition(".")[0] in MODULES]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        found += [node.attr] if node.attr in {"os": OF_OS, "signal": OF_SIGNAL}.get(node.value.id, ()) else []
        found += [node.attr] if (node.value.id, node.attr) == ("os", "kill") else []
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        found += [match.group() for match in [IN_TEXT.search(node.value)] if match]
    return found + [name for child in ast.iter_child_nodes(node) for name in lacking(child)]
