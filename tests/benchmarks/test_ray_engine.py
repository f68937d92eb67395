"""The Ray engine on a local cluster of two nodes, one of which is killed while it works: skipped without Ray."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dipole.benchmarks.run.ray_engine import pack, unpack
from dipole.benchmarks.run_records import BENCH, read_records


def test_a_run_travels_whole_and_without_checkpoints(runs_folder, tmp_path):
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


SUITE = """
name = "tiny"
title = "tiny"
[[columns]]
name = "knn"
metric = "knn/accuracy"
[[rows]]
method = "infonce"
objective = "infonce"
[[rows]]
method = "dcl"
objective = "dcl"
[scale.small]
recipe = "digits-simclr"
seeds = [0]
set = ["train.epochs=2", "vision.probe.baselines=false", "vision.probe.probes=['knn']"]
"""


@pytest.fixture
def two_nodes():
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    os.environ["RAY_DISABLE_MEMORY_MONITOR"] = "1"
    small = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **small})
    second = cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster, second
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
def test_a_lost_node_loses_no_job_and_the_results_are_those_of_the_local_engine(two_nodes, tmp_path):
    from dipole.benchmarks.run.bench import label
    from dipole.benchmarks.run.engines import LocalEngine
    from dipole.benchmarks.run.ray_engine import RayEngine
    from dipole.benchmarks.run.tasks import Task
    from dipole.benchmarks.suite import read_suite

    cluster, second = two_nodes
    (tmp_path / "tiny.toml").write_text(SUITE)
    jobs = read_suite(tmp_path / "tiny.toml").at("small").jobs()
    tasks = [Task(job.hash, label(job), job.command) for job in jobs]
    runs, local = tmp_path / "ray", tmp_path / "local"
    runs.mkdir()
    local.mkdir()
    engine = RayEngine()
    assert engine.slots == 2
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(lambda: list(engine.run(tasks, runs)))
        claims = runs / BENCH / "claims"
        deadline = time.monotonic() + 300
        while len(list(claims.glob("*.json"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        # Both jobs are at work, one on each node.
        cluster.remove_node(second, allow_graceful=False)
        ended = ended.result()
    assert sorted(r.task.hash for r in ended) == sorted(task.hash for task in tasks)
    assert {r.status for r in ended} == {"done"}
    assert not list((runs / BENCH).glob("shared-*"))

    # The lost one was started twice.
    assert sum(log.read_text().count("== ") for log in (runs / BENCH / "logs").glob("*.log")) == 3
    assert {r.status for r in LocalEngine(jobs=1, threads=1).run(tasks, local)} == {"done"}
    there, here = read_records(runs).done, read_records(local).done
    assert len(there) == len(here) == 2
    for name in here:
        assert there[name].results == here[name].results
        assert there[name].diagnostics == here[name].diagnostics


@pytest.mark.slow
def test_a_node_without_the_folder_sends_the_run_back(two_nodes, tmp_path):
    from dipole.benchmarks.run.ray_engine import _on_node
    from dipole.benchmarks.run.tasks import Task
    from dipole.benchmarks.suite import read_suite

    (tmp_path / "tiny.toml").write_text(SUITE)
    job = read_suite(tmp_path / "tiny.toml").at("small").jobs()[0]
    task = Task(job.hash, "one", job.command)
    status, _, message, archive = _on_node(task, str(tmp_path / "not-here"), "no-such-token", 1)
    assert (status, message) == ("done", "")
    runs = tmp_path / "runs"
    (runs / BENCH).mkdir(parents=True)
    unpack(archive, runs, job.hash)
    assert json.loads((Path(runs) / job.hash / "record.json").read_text())["status"] == "done"
