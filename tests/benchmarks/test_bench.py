"""`dipole bench` with real runs on digits: killed in the middle and started again, with a job that must fail."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dipole.benchmarks.collect import collect
from dipole.benchmarks.engines import LocalEngine, Task, cores, environment_for, visible_gpus
from dipole.benchmarks.worker import BENCH
from dipole.core.cli import main
from dipole.core.errors import ConfigError

SUITE = """
name = "tiny"
title = "tiny"
base = "infonce"
[[columns]]
name = "knn"
metric = "knn/accuracy"
[[rows]]
method = "infonce"
objective = "infonce"
[[rows]]
method = "broken"
objective = "infonce"
set = ["train.learning_rate=1e30"]
[[rows]]
method = "dcl"
objective = "dcl"
[scale.small]
recipe = "digits-simclr"
seeds = [0]
set = ["train.epochs=2", "train.checkpoint_every=1", "vision.probe.baselines=false", "vision.probe.probes=['knn']"]
"""


def start(folder):
    command = [sys.executable, "-m", "dipole.core.cli", "bench", "tiny.toml", "--jobs", "1", "--threads", "1"]
    output = (folder / "output.txt").open("a")
    return subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, start_new_session=True)


def wait_for(condition, what, seconds=300):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.05)
    return found


def finished(folder):
    return collect(folder / "runs").done if (folder / "runs").is_dir() else {}


def starts(folder):
    """How often a worker was started, by run."""
    logs = (folder / "runs" / BENCH / "logs").glob("*.log")
    return {log.stem: log.read_text().count("== ") for log in logs}


def test_killed_at_any_moment_nothing_is_lost_repeated_or_half_counted(tmp_path):
    (tmp_path / "tiny.toml").write_text(SUITE)
    runner = start(tmp_path)
    first = next(iter(wait_for(lambda: finished(tmp_path), "finished run")))
    claims = tmp_path / "runs" / BENCH / "claims"
    wait_for(lambda: [p for p in claims.glob("*.json") if p.stem != first], "claim of the second run")
    os.killpg(runner.pid, signal.SIGKILL)
    runner.wait()
    record = tmp_path / "runs" / first / "record.json"
    before = record.stat().st_mtime_ns

    assert start(tmp_path).wait(600) == 1
    output = (tmp_path / "output.txt").read_text()
    assert "1 of 3 runs are finished already" in output
    assert "1 runs done, 1 were finished before, 1 failed" in output
    broken = next(line for line in output.splitlines() if line.strip().startswith("log:")).split()[-1]
    assert "not finite" in (tmp_path / broken).read_text()
    assert "again: dipole train digits-simclr" in output
    assert record.stat().st_mtime_ns == before
    assert starts(tmp_path)[first] == 1
    done = finished(tmp_path)
    assert {r.objective for r in done.values()} == {"infonce", "dcl"}
    assert not list(claims.glob("*.json"))

    # A third time: nothing but the failed job is tried.
    attempts = starts(tmp_path)
    assert start(tmp_path).wait(600) == 1
    tried = {name for name, count in starts(tmp_path).items() if count > attempts[name]}
    assert tried == attempts.keys() - done.keys()

    assert main(["report", str(tmp_path / "runs"), "-o", str(tmp_path / "report.html")]) == 0
    assert "tiny-small-results" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_workers_of_a_killed_runner_stop_and_two_runners_share_the_work(tmp_path):
    (tmp_path / "tiny.toml").write_text(SUITE.replace("epochs=2", "epochs=6").replace("seeds = [0]", "seeds = [0, 1]"))
    runner = start(tmp_path)
    claims = tmp_path / "runs" / BENCH / "claims"
    claim = wait_for(lambda: next(iter(claims.glob("*.json")), None), "claim")
    worker = json.loads(claim.read_text())["pid"]
    os.kill(runner.pid, signal.SIGKILL)
    runner.wait()
    wait_for(lambda: not Path(f"/proc/{worker}").exists(), "end of the orphan", 90)
    one, other = start(tmp_path), start(tmp_path)
    assert (one.wait(900), other.wait(900)) == (1, 1)
    assert len(finished(tmp_path)) == 4
    # Nobody trained what the other one had.
    logs = [(tmp_path / "runs" / BENCH / "logs" / f"{name}.log").read_text() for name in finished(tmp_path)]
    assert [log.count("finished ") for log in logs] == [1] * 4


@pytest.mark.slow
def test_a_run_of_several_processes_goes_through_torchrun(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = SUITE.replace("seeds = [0]", "seeds = [0]\nprocesses = 2").replace("epochs=2", "epochs=1")
    (tmp_path / "tiny.toml").write_text(text)
    assert main(["bench", "tiny.toml", "--jobs", "1", "--threads", "1"]) == 1
    done = finished(tmp_path)
    assert {r.objective for r in done.values()} == {"infonce", "dcl"}
    assert {r.hardware.world_size for r in done.values()} == {2}


def test_bad_requests_are_one_message(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "no-such-suite"]) == 2
    assert main(["bench", "tiny", "--scale", "huge"]) == 2
    assert main(["report", "nowhere"]) == 1
    (tmp_path / "tiny.toml").write_text(SUITE.replace('objective = "dcl"', 'objective = "dlc"'))
    assert main(["bench", "tiny.toml"]) == 2
    errors = capsys.readouterr().err
    assert "dcl" in errors
    assert "Traceback" not in errors


def test_a_task_that_needs_more_gpus_than_there_are_is_refused_before_anything_runs(tmp_path):
    engine = LocalEngine(gpus=["0", "1"])
    assert (engine.slots, engine.threads) == (2, max(1, cores() // 2))
    with pytest.raises(ConfigError, match="needs 3 GPUs, 2 are visible"):
        list(engine.run([Task("h", "big", ["train"], processes=3)], tmp_path))


def test_workers_see_only_their_gpus_and_threads(monkeypatch):
    environment = environment_for(3, "1")
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment["OMP_NUM_THREADS"] == "3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-7")
    assert visible_gpus() == ["2", "GPU-7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []
