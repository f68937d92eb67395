"""Claims: exclusive among living processes, free again as soon as the owner is gone."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import time

import pytest

from dipole.benchmarks import lease
from dipole.benchmarks.lease import TakenError, claim, is_held, process_start


def hold(folder, ready):
    with claim(folder, "job"):
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


def test_a_claim_excludes_others_until_given_back(tmp_path):
    with claim(tmp_path, "job"):
        assert is_held(tmp_path / "job.json")
        with pytest.raises(TakenError), claim(tmp_path, "job"):
            pass
        with claim(tmp_path, "another"):
            pass
    assert not (tmp_path / "job.json").exists()
    with claim(tmp_path, "job"):
        pass


def test_kill_9_frees_the_claim_at_once(tmp_path, holder):
    with pytest.raises(TakenError), claim(tmp_path, "job"):
        pass
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    with claim(tmp_path, "job"):
        assert json.loads((tmp_path / "job.json").read_text())["pid"] == os.getpid()


def test_a_reused_pid_is_not_the_owner(tmp_path):
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": "1"}
    (tmp_path / "job.json").write_text(json.dumps(owner))
    assert not is_held(tmp_path / "job.json")


def test_another_host_is_believed_while_it_renews(tmp_path):
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": "1"}))
    assert is_held(path)
    old = time.time() - lease.STALE_AFTER - 5
    os.utime(path, (old, old))
    assert not is_held(path)


def test_renewal_keeps_a_claim_fresh(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_EVERY", 0.05)
    with claim(tmp_path, "job"):
        path = tmp_path / "job.json"
        os.utime(path, (1, 1))
        deadline = time.monotonic() + 10
        while path.stat().st_mtime == 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert path.stat().st_mtime > 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 3}'])
def test_a_claim_that_was_never_written_whole_holds_nothing(tmp_path, text):
    (tmp_path / "job.json").write_text(text)
    assert not is_held(tmp_path / "job.json")


def test_process_start_tells_processes_apart():
    assert process_start(os.getpid()) == process_start(os.getpid())
    with subprocess.Popen(["sleep", "60"]) as later:
        assert process_start(later.pid) not in (None, process_start(os.getpid()))
        later.kill()
    assert process_start(2**22 + 1) is None
