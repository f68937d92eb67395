"""Claims: exclusive among living processes, free again as soon as the owner is gone."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from dipole.benchmarks.run import claim as claims
from dipole.benchmarks.run.claim import TakenError, claim, is_held


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
    old = time.time() - claims.STALE_AFTER - 5
    os.utime(path, (old, old))
    assert not is_held(path)


def test_renewal_keeps_a_claim_fresh(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "RENEW_EVERY", 0.05)
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


def test_a_process_that_goes_on_beside_a_dead_owner_holds_nothing(tmp_path):
    """A pid may be reused, and what the owner had started may outlive it: neither is the owner."""
    script = (
        "import subprocess, sys, os; from pathlib import Path; from dipole.benchmarks.run.claim import claim\n"
        "with claim(Path(sys.argv[1]), 'job'):\n"
        "    print(subprocess.Popen(['sleep', '60']).pid, flush=True); os.kill(os.getpid(), 9)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as owner:
        child = int(owner.stdout.readline())
        assert owner.wait() == -signal.SIGKILL
        try:
            assert (tmp_path / "job.json").exists()
            assert not is_held(tmp_path / "job.json")
            with claim(tmp_path, "job"):
                assert is_held(tmp_path / "job.json")
        finally:
            os.kill(child, signal.SIGKILL)
