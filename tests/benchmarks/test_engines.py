"""Engines: workers that are killed, nodes that are lost, jobs of Ray and SLURM, and the lock of a job."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from dipole.benchmarks.manifest import BENCH, read_records
from dipole.benchmarks.run import worker
from dipole.benchmarks.run.bench import make_engine
from dipole.benchmarks.run.cluster_engines import RayEngine, SlurmEngine, on_node, pack, unpack
from dipole.benchmarks.run.engine import EngineTask, LocalEngine, PoolEngine, log_of
from dipole.benchmarks.run.worker import TakenError, is_held, locked
from dipole.core.train.recipe import load_recipe
from dipole.core.train.run import train
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.process import describe_self
from tests.benchmarks.conftest import wait_for
from tests.systems import KILL_SELF, kill, was_killed

SHORT = [f"train.{part}" for part in ("batch_size=32", "checkpoint_every=1", "log_every=1")]
SHORT += ["toy.points=64", "toy.test_points=40"]
UNTRAINED = "objective=none"  # imports less than training does


def task(seed, steps=2, *more):
    settings = [*SHORT, f"seed={seed}", f"train.steps={steps}", *more]
    command = ["train", "gaussian-classes", *(part for text in settings for part in ("--set", text))]
    return EngineTask(load_recipe("gaussian-classes", settings).config.hash, f"seed {seed}", command)


def run(engine, tasks, runs):
    """Run the tasks. Return the results by label."""
    return {result.task.label: result for result in engine.run(tasks, runs)}


def starts(task, runs):
    return log_of(task, runs).read_text().count("== ")


class Killer(threading.Thread):
    """Kill the process that trains a run once it has a checkpoint, and those that go on with it: `times` in all."""

    def __init__(self, runs: Path, name: str, times: int, parent: bool = False) -> None:
        super().__init__(daemon=True)
        self.run_folder, self.claim = runs / name, runs / BENCH / "claims" / f"{name}.json"
        self.times, self.parent, self.killed = times, parent, []
        self.start()

    def run(self):
        end = time.monotonic() + 120
        while len(self.killed) < self.times and time.monotonic() < end:
            time.sleep(0.005)
            with suppress(OSError, ValueError, psutil.Error):
                pid = json.loads(self.claim.read_text())["pid"]
                if any(self.run_folder.glob("checkpoints/*")) and pid not in self.killed:
                    victim = psutil.Process(pid)
                    (victim.parent() if self.parent else victim).kill()
                    self.killed.append(pid)


@pytest.mark.parametrize("make", [
    lambda: PoolEngine(jobs=1, threads=1),
    pytest.param(lambda: LocalEngine(jobs=2, threads=1, gpus=[]), marks=pytest.mark.slow),
    pytest.param(lambda: SlurmEngine(2, 1, cluster="local"), marks=pytest.mark.slow),
], ids=["pool", "local", "slurm"])  # fmt: skip
def test_a_killed_worker_is_replaced_and_its_run_goes_on_from_its_checkpoint(tmp_path, make):
    victim, *others = task(0, 30), task(1), task(2)
    engine = make()
    killer = Killer(tmp_path, victim.hash, times=1, parent=isinstance(engine, SlurmEngine))
    results = run(engine, [victim, *others], tmp_path)
    assert len(killer.killed) == 1
    assert {label: result.status for label, result in results.items()} == dict.fromkeys(results, "done")
    assert read_records(tmp_path).done.keys() == {each.hash for each in [victim, *others]}
    # Each step was trained and logged once, because the second process began at the checkpoint of the first.
    lines = map(json.loads, (tmp_path / victim.hash / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if "train/loss" in line] == list(range(1, 31))
    assert [starts(each, tmp_path) for each in [victim, *others]] == [2, 1, 1]


@pytest.mark.slow
def test_a_run_whose_worker_is_killed_twice_has_failed_by_name_and_no_other(tmp_path):
    victim, *others = task(0, 4000), task(1), task(2), task(3)
    killer = Killer(tmp_path, victim.hash, times=2)
    results = run(PoolEngine(2, 1), [victim, *others], tmp_path)
    assert len(killer.killed) == 2
    assert {label for label, result in results.items() if result.status == "done"} == {"seed 1", "seed 2", "seed 3"}
    assert "killed twice" in results["seed 0"].message
    assert starts(victim, tmp_path) == 2


def test_slurm_trains_jobs_and_reports_what_fails(tmp_path):
    good, bad = task(0, 2, UNTRAINED), replace(task(1), hash="0" * 12)
    results = run(SlurmEngine(2, 1, cluster="local"), [good, bad], tmp_path / "runs")
    assert {label: result.status for label, result in results.items()} == {"seed 0": "done", "seed 1": "failed"}
    assert read_records(tmp_path / "runs").done.keys() == {good.hash}
    assert "these settings are now run" in results["seed 1"].message
    with pytest.raises(ConfigError, match=r"partion: no such option\. Did you mean 'partition'"):
        SlurmEngine(options={"partion": "gpu"}, cluster="local")
    if shutil.which("sbatch") is None:
        with pytest.raises(ConfigError, match="no sbatch on this machine"):
            make_engine("slurm", None, None)


def test_packs_a_run_without_its_checkpoints(runs_folder, tmp_path):
    here, there = runs_folder.path, tmp_path / "there"
    name = runs_folder.record()
    for folder in (here / name / "checkpoints", here / BENCH / "logs", there / BENCH, there / name):
        folder.mkdir(parents=True)
    (here / name / "checkpoints" / "step-1.pt").write_bytes(b"x" * 1000)
    (here / BENCH / "logs" / f"{name}.log").write_text("hello")
    (there / name / "record.json").write_text("an earlier, failed attempt")
    unpack(pack(here, name), there, name)
    assert read_records(there).records == read_records(here).records
    assert not (there / name / "checkpoints").exists()
    assert (there / BENCH / "logs" / f"{name}.log").read_text() == "hello"
    assert [p.name for p in (there / BENCH).iterdir()] == ["logs"]


@pytest.fixture
def two_nodes(monkeypatch):
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_DISABLE_MEMORY_MONITOR", "1")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_log_monitor": False}
    cluster = Cluster(True, head_node_args={**node, "include_dashboard": False, "no_monitor": True})
    second = cluster.add_node(**node)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster, second
    ray.shutdown()
    cluster.shutdown()


def test_ray_restarts_the_job_of_a_lost_node_and_trains_as_one_process_does(two_nodes, tmp_path):
    cluster, second = two_nodes
    tasks, runs = [task(0), task(1, 2, UNTRAINED)], tmp_path / "runs"
    ended, started = tmp_path / "go-on", tmp_path / "started"
    runs.mkdir()
    started.mkdir()

    def held(task, runs, token, threads):
        """Wait before the run, so that the node is lost in the middle of its job on a fast machine as well."""
        (started / f"{task.hash}-{os.getpid()}").touch()
        while not ended.exists():
            time.sleep(0.05)
        return on_node(task, runs, token, threads)

    engine = RayEngine(threads=1)
    assert engine.slots == 2
    engine.on_node = held
    with ThreadPoolExecutor(1) as pool:
        results = pool.submit(lambda: list(engine.run(tasks, runs)))
        wait_for(lambda: len(list(started.iterdir())) > 1, "second process", 120)
        cluster.remove_node(second, allow_graceful=False)
        ended.touch()
        results = results.result(300)
    assert sorted(result.task.hash for result in results) == sorted(task.hash for task in tasks)
    assert {(result.status, result.message) for result in results} == {("done", "")}
    assert all(result.log == log_of(result.task, runs) for result in results)
    assert len(list(started.iterdir())) == 3
    assert not list((runs / BENCH).glob("shared-*"))
    for each in tasks:
        alone = train(load_recipe("gaussian-classes", each.command[3::2]).config, tmp_path / "alone", quiet=True)
        record = read_records(runs).done[each.hash]
        assert (record.results, record.diagnostics) == (alone.results, alone.diagnostics)


def test_ray_sends_a_run_back_from_a_node_without_the_runs_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    one = task(2, 2, UNTRAINED)
    result, archive = on_node(one, str(tmp_path / "not-here"), "no-such-token", 1)
    assert (result.status, result.message) == ("done", "")
    (tmp_path / "runs" / BENCH).mkdir(parents=True)
    unpack(archive, tmp_path / "runs", one.hash)
    assert read_records(tmp_path / "runs").done.keys() == {one.hash}


def test_a_lock_excludes_others_until_given_back(tmp_path):
    path = tmp_path / "job.json"
    for text in ("", "{", "[]", '{"host": 3}'):  # never written whole
        path.write_text(text)
        assert not is_held(path)
    # A runner that is killed while it locks leaves a file, which the next lock of its job removes.
    left, another = tmp_path / ".job.857c482e.tmp.json", tmp_path / ".other.857c482e.tmp.json"
    left.write_text("{")
    another.write_text("{")
    with locked(tmp_path, "job"):
        assert is_held(path)
        assert json.loads(path.read_text()).keys() == {"host", "pid", "boot", "namespace", "began"}
        assert not left.exists()
        with pytest.raises(TakenError), locked(tmp_path, "job"):
            pass
        with locked(tmp_path, "another"):
            pass
    assert not path.exists()
    assert another.exists()
    with locked(tmp_path, "job"):
        pass


def test_a_killed_owner_frees_its_lock_at_once_whatever_goes_on_beside_it(tmp_path):
    """A pid may be reused, and what the owner had started may outlive it: neither is the owner."""
    script = (
        "import subprocess, sys; from pathlib import Path; from dipole.benchmarks.run.worker import locked\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "with locked(Path(sys.argv[1]), 'job'):\n"
        "    print(subprocess.Popen(sleep, stdout=subprocess.DEVNULL).pid, flush=True); sys.stdin.read(1)\n"
        f"    {KILL_SELF}"
    )
    command, pipe = [sys.executable, "-c", script, str(tmp_path)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as owner:
        child = int(owner.stdout.readline())
        with pytest.raises(TakenError), locked(tmp_path, "job"):
            pass
        owner.stdin.close()
        assert was_killed(owner.wait())
        try:
            assert (tmp_path / "job.json").exists()
            assert not is_held(tmp_path / "job.json")
            with locked(tmp_path, "job"):
                assert is_held(tmp_path / "job.json")
                assert json.loads((tmp_path / "job.json").read_text())["pid"] == os.getpid()
        finally:
            kill(child)


def test_renewal_keeps_a_lock_fresh(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "RENEW_EVERY", 0.05)
    with locked(tmp_path, "job"):
        path = tmp_path / "job.json"
        os.utime(path, (1, 1))
        wait_for(lambda: path.stat().st_mtime > 1, "renewal", 10)


OWNERS = {  # what differs from this process, seconds since the last renewal, and whether the lock is held
    "another container under the same host name": ({"namespace": "pid:[1]", "pid": 1}, 0, True),
    "container, stale": ({"namespace": "pid:[1]", "pid": 1}, worker.STALE_AFTER + 5, False),
    "host": ({"host": "elsewhere", "pid": 1}, 0, True),
    "host, stale": ({"host": "elsewhere", "pid": 1}, worker.STALE_AFTER + 5, False),
    "dated in the future": ({"host": "elsewhere", "pid": 1}, -1e9, False),
    "another machine of this name, which lives": ({"boot": "another"}, 0, True),
    "before the last boot": ({"boot": "another"}, time.time() - psutil.boot_time() + 60, False),
    "the number of another process now": ({"began": "1", "pid": os.getppid()}, 0, False),
    "our number": ({"began": "1"}, 0, False),
}


@pytest.mark.parametrize(("owner", "age", "held"), OWNERS.values(), ids=OWNERS)
def test_a_process_that_shares_no_lock_is_believed_as_long_as_it_can_live(tmp_path, owner, age, held):
    path = tmp_path / "job.json"
    path.write_text(json.dumps(json.loads(describe_self()) | owner))
    os.utime(path, (time.time() - age,) * 2)
    assert is_held(path) is held


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "-p", "--fork", "true"], capture_output=True, check=False).returncode != 0,
    reason="no name spaces can be made here",
)
def test_a_worker_in_a_name_space_of_its_own_is_seen_and_missed(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from dipole.benchmarks.run.worker import locked\n"
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
    os.utime(path, (time.time() - worker.STALE_AFTER - 1,) * 2)
    with locked(tmp_path, "job"):
        pass
