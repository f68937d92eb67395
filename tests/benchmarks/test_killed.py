"""A worker that is killed: its run goes on once from its checkpoint, and takes none of the others with it."""

import json
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from dipole.benchmarks.run.engine import Task, log_of
from dipole.benchmarks.run.local_engine import LocalEngine, PoolEngine
from dipole.benchmarks.run_records import BENCH, read_records
from dipole.core.train.recipe import load

SHORT = (
    "train.epochs=", "train.warmup=0", "train.batch_size=32", "train.checkpoint_every=1", "train.log_every=1",
    "vision.data.limit=64", "vision.probe.probes=['knn']", "vision.probe.baselines=false",
)  # fmt: skip
ENGINES = {
    "pool": lambda: PoolEngine(jobs=2, threads=1),
    "local": lambda: LocalEngine(jobs=2, threads=1, gpus=[]),
}


def task(seed, steps):
    settings = [*SHORT, f"seed={seed}", f"train.steps={steps}"]
    command = ["train", "digits-simclr", *(part for text in settings for part in ("--set", text))]
    return Task(load("digits-simclr", settings).config.hash, f"seed {seed}", command)


class Killer(threading.Thread):
    """Kills what trains a run, once it has a checkpoint, and those that go on with it: `times` processes in all."""

    def __init__(self, runs: Path, name: str, times: int, parent: bool = False) -> None:
        super().__init__(daemon=True)
        self.run_folder, self.claim = runs / name, runs / BENCH / "claims" / f"{name}.json"
        self.times, self.parent, self.killed = times, parent, []

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


def steps(runs, name):
    lines = map(json.loads, (runs / name / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if "train/loss" in line]


@pytest.mark.parametrize("engine", ["pool", pytest.param("local", marks=pytest.mark.slow)])
def test_a_killed_worker_is_replaced_and_its_run_goes_on_from_its_checkpoint(tmp_path, engine):
    victim, *others = task(0, 60), task(1, 2), task(2, 2), task(3, 2)
    killer = Killer(tmp_path, victim.hash, times=1)
    killer.start()
    results = {result.task.label: result for result in ENGINES[engine]().run([victim, *others], tmp_path)}
    assert len(killer.killed) == 1
    assert {label: result.status for label, result in results.items()} == dict.fromkeys(results, "done")
    assert read_records(tmp_path).done.keys() == {each.hash for each in [victim, *others]}
    assert log_of(victim, tmp_path).read_text().count("== ") == 2
    # Each step was trained and told once: the second process began where the first one's checkpoint ends.
    assert steps(tmp_path, victim.hash) == list(range(1, 61))
    assert [log_of(each, tmp_path).read_text().count("== ") for each in others] == [1, 1, 1]


@pytest.mark.slow
def test_a_run_whose_worker_is_killed_twice_has_failed_by_name_and_no_other(tmp_path):
    victim, *others = task(0, 4000), task(1, 2), task(2, 2), task(3, 2)
    killer = Killer(tmp_path, victim.hash, times=2)
    killer.start()
    results = {result.task.label: result for result in PoolEngine(1, 1).run([victim, *others], tmp_path)}
    assert len(killer.killed) == 2
    assert {label for label, result in results.items() if result.status == "done"} == {"seed 1", "seed 2", "seed 3"}
    assert "killed twice" in results["seed 0"].message
    assert log_of(victim, tmp_path).read_text().count("== ") == 2


@pytest.mark.slow
def test_a_slurm_job_that_is_killed_is_submitted_once_more(tmp_path):
    pytest.importorskip("submitit")
    from dipole.benchmarks.run.slurm_engine import SlurmEngine

    victim, other = task(0, 60), task(1, 2)
    killer = Killer(tmp_path, victim.hash, times=1, parent=True)
    killer.start()
    results = {each.task.label: each for each in SlurmEngine(2, 1, cluster="local").run([victim, other], tmp_path)}
    assert len(killer.killed) == 1
    assert {label: result.status for label, result in results.items()} == {"seed 0": "done", "seed 1": "done"}
