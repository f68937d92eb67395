"""Claims: exclusive among living processes, free again as soon as the owner is gone."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time

import psutil
import pytest

from dipole.benchmarks.run import job_lock
from dipole.benchmarks.run.job_lock import TakenError, is_held, locked
from dipole.core.utils.process import describe_self
from tests.systems import KILL_SELF, kill, was_killed


def hold(folder, ready):
    with locked(folder, "job"):
        ready.set()
        time.sleep(60)


@pytest.fixture
def holder(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=hold, args=(tmp_path, ready))
    process.start()
    assert ready.wait(30)
    yield process
    process.kill()
    process.join()


def test_a_lock_excludes_others_until_given_back(tmp_path):
    with locked(tmp_path, "job"):
        assert is_held(tmp_path / "job.json")
        with pytest.raises(TakenError), locked(tmp_path, "job"):
            pass
        with locked(tmp_path, "another"):
            pass
    assert not (tmp_path / "job.json").exists()
    with locked(tmp_path, "job"):
        pass


def test_kill_9_frees_the_lock_at_once(tmp_path, holder):
    with pytest.raises(TakenError), locked(tmp_path, "job"):
        pass
    holder.kill()
    holder.join()
    with locked(tmp_path, "job"):
        assert json.loads((tmp_path / "job.json").read_text())["pid"] == os.getpid()


def test_renewal_keeps_a_lock_fresh(tmp_path, monkeypatch):
    monkeypatch.setattr(job_lock, "RENEW_EVERY", 0.05)
    with locked(tmp_path, "job"):
        path = tmp_path / "job.json"
        os.utime(path, (1, 1))
        deadline = time.monotonic() + 10
        while path.stat().st_mtime == 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert path.stat().st_mtime > 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 3}'])
def test_a_lock_that_was_never_written_whole_holds_nothing(tmp_path, text):
    (tmp_path / "job.json").write_text(text)
    assert not is_held(tmp_path / "job.json")


def test_a_process_that_goes_on_beside_a_dead_owner_holds_nothing(tmp_path):
    """A pid may be reused, and what the owner had started may outlive it: neither is the owner."""
    script = (
        "import subprocess, sys; from pathlib import Path; from dipole.benchmarks.run.job_lock import locked\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "with locked(Path(sys.argv[1]), 'job'):\n"
        f"    print(subprocess.Popen(sleep, stdout=subprocess.DEVNULL).pid, flush=True); {KILL_SELF}"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as owner:
        child = int(owner.stdout.readline())
        assert was_killed(owner.wait())
        try:
            assert (tmp_path / "job.json").exists()
            assert not is_held(tmp_path / "job.json")
            with locked(tmp_path, "job"):
                assert is_held(tmp_path / "job.json")
        finally:
            kill(child)


def made_up(folder, age=0.0, **owner):
    """A lock of the process that describes itself, with something else in its place, last renewed `age` s ago."""
    path = folder / "job.json"
    path.write_text(json.dumps(json.loads(describe_self()) | owner))
    os.utime(path, (time.time() - age, time.time() - age))
    return path


@pytest.mark.parametrize(
    ("owner", "age", "held"),
    [
        ({"namespace": "pid:[1]", "pid": 1}, 0, True),  # another container under the same host name
        ({"namespace": "pid:[1]", "pid": 1}, job_lock.STALE_AFTER + 5, False),
        ({"host": "elsewhere", "pid": 1}, 0, True),
        ({"host": "elsewhere", "pid": 1}, job_lock.STALE_AFTER + 5, False),
        ({"host": "elsewhere", "pid": 1}, -1e9, False),  # dated in the future
        ({"boot": "another"}, 0, True),  # another machine of this name, which lives
        ({"boot": "another"}, time.time() - psutil.boot_time() + 60, False),  # this machine, before its last start
        ({"began": "1", "pid": os.getppid()}, 0, False),  # the number of another process now
        ({"began": "1"}, 0, False),
    ],
    ids=[
        "container",
        "container, stale",
        "host",
        "stale",
        "future",
        "boot",
        "before this boot",
        "number taken",
        "ours",
    ],
)
def test_a_process_that_shares_no_lock_is_believed_as_long_as_it_can_live(tmp_path, owner, age, held):
    assert is_held(made_up(tmp_path, age, **owner)) is held


def test_a_lock_names_boot_name_space_and_beginning(tmp_path):
    with locked(tmp_path, "job"):
        assert json.loads((tmp_path / "job.json").read_text()).keys() == {"host", "pid", "boot", "namespace", "began"}


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "-p", "--fork", "true"], capture_output=True, check=False).returncode != 0,
    reason="no name spaces can be made here",
)
def test_a_worker_in_a_name_space_of_its_own_is_seen_and_missed(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from dipole.benchmarks.run.job_lock import locked\n"
        "with locked(Path(sys.argv[1]), 'job'):\n    print('held', flush=True); time.sleep(60)"
    )
    command = ["unshare", "-p", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        path = tmp_path / "job.json"
        # Its number is also one of ours: the number alone says nothing.
        assert json.loads(path.read_text())["namespace"] != os.readlink("/proc/self/ns/pid")
        with pytest.raises(TakenError), locked(tmp_path, "job"):
            pass
        other.kill()
    assert is_held(path)
    old = time.time() - job_lock.STALE_AFTER - 1
    os.utime(path, (old, old))
    with locked(tmp_path, "job"):
        pass


def test_what_a_runner_killed_while_it_locked_left_is_removed_with_the_next_lock(tmp_path):
    left, another = tmp_path / ".job.857c482e.tmp.json", tmp_path / ".other.857c482e.tmp.json"
    left.write_text("{")
    another.write_text("{")  # of a job that somebody else may be locking now
    with locked(tmp_path, "job"):
        assert not left.exists()
    assert another.exists()
