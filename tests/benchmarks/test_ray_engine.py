"""The Ray engine on a local cluster of two nodes, one of which is killed while it works."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dipole.benchmarks.run.engine import Task, log_of
from dipole.benchmarks.run.ray_engine import RayEngine, on_node, pack, unpack
from dipole.benchmarks.run_records import BENCH, read_records
from dipole.core.record import read_record
from dipole.core.train.recipe import load
from dipole.core.train.run import train

SHORT = (
    "train.epochs=", "train.steps=2", "train.warmup=0", "train.batch_size=32", "vision.data.limit=64",
    "vision.probe.probes=['knn']", "vision.probe.baselines=false",
)  # fmt: skip


def config(seed):
    return load("digits-simclr", [*SHORT, f"seed={seed}"]).config


def task(seed):
    command = ["train", "digits-simclr"]
    for text in (*SHORT, f"seed={seed}"):
        command += ["--set", text]
    return Task(config(seed).hash, f"seed {seed}", command)


def test_packs_a_run_without_its_checkpoints(runs_folder, tmp_path):
    run = runs_folder.record()
    checkpoints = runs_folder.path / run / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "step-1.pt").write_bytes(b"x" * 1000)
    log = runs_folder.path / BENCH / "logs" / f"{run}.log"
    log.parent.mkdir(parents=True)
    log.write_text("hello")
    there = tmp_path / "there"
    (there / BENCH).mkdir(parents=True)
    (there / run).mkdir()
    (there / run / "record.json").write_text("an earlier, failed attempt")
    unpack(pack(runs_folder.path, run), there, run)
    assert read_records(there).records == read_records(runs_folder.path).records
    assert not (there / run / "checkpoints").exists()
    assert (there / BENCH / "logs" / f"{run}.log").read_text() == "hello"
    assert [p.name for p in (there / BENCH).iterdir()] == ["logs"]


@pytest.fixture
def two_nodes(monkeypatch):
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_DISABLE_MEMORY_MONITOR", "1")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    second = cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster, second
    ray.shutdown()
    cluster.shutdown()


def test_restarts_the_job_of_a_lost_node_and_trains_as_one_process_does(two_nodes, tmp_path):
    cluster, second = two_nodes
    tasks, runs, ended = [task(0), task(1)], tmp_path / "runs", tmp_path / "go-on"
    runs.mkdir()
    started = tmp_path / "started"
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
        deadline = time.monotonic() + 120
        while len(list(started.iterdir())) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        cluster.remove_node(second, allow_graceful=False)
        ended.touch()
        results = results.result(300)
    assert sorted(result.task.hash for result in results) == sorted(task.hash for task in tasks)
    assert {(result.status, result.message) for result in results} == {("done", "")}
    assert all(result.log == log_of(result.task, runs) for result in results)
    assert len(list(started.iterdir())) == 3
    assert not list((runs / BENCH).glob("shared-*"))
    records = read_records(runs).done
    for seed in (0, 1):
        alone = train(config(seed), tmp_path / "alone", quiet=True)
        record = records[config(seed).hash]
        assert record.results == alone.results
        assert record.diagnostics == alone.diagnostics


def test_sends_a_run_back_from_a_node_without_the_runs_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    one = task(2)
    result, archive = on_node(one, str(tmp_path / "not-here"), "no-such-token", 1)
    assert (result.status, result.message) == ("done", "")
    runs = tmp_path / "runs"
    (runs / BENCH).mkdir(parents=True)
    unpack(archive, runs, one.hash)
    assert read_record(Path(runs) / one.hash / "record.json").status == "done"
