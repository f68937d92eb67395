"""The SLURM engine, on this machine's processes; without sbatch it says so."""

import shutil

import pytest

from dipole.benchmarks.run.bench import make_engine
from dipole.benchmarks.run.engine import Task
from dipole.benchmarks.run.slurm_engine import SlurmEngine
from dipole.core.record import read_record
from dipole.core.train.recipe import load
from dipole.core.utils.errors import ConfigError

SHORT = (
    "train.epochs=", "train.steps=2", "train.warmup=0", "train.batch_size=32", "vision.data.limit=64",
    "vision.probe.probes=['knn']", "vision.probe.baselines=false",
)  # fmt: skip


def test_jobs_train_and_one_that_fails_is_said(tmp_path):
    good = load("digits-simclr", SHORT).config
    command = ["train", "digits-simclr", *(part for text in SHORT for part in ("--set", text))]
    bad = load("digits-simclr", [*SHORT, f"vision.data.source={tmp_path}/absent"]).config
    tasks = [
        Task(good.hash, "good", command),
        Task(bad.hash, "bad", [*command, "--set", f"vision.data.source={tmp_path}/absent"]),
    ]
    results = {each.task.label: each for each in SlurmEngine(2, 1, cluster="local").run(tasks, tmp_path / "runs")}
    assert results["good"].status == "done"
    assert read_record(tmp_path / "runs" / good.hash / "record.json").status == "done"
    assert results["bad"].status == "failed"
    assert "absent" in results["bad"].message


@pytest.mark.skipif(shutil.which("sbatch") is not None, reason="there is a SLURM here")
def test_without_sbatch_and_with_an_unknown_option_it_says_so():
    with pytest.raises(ConfigError, match="no sbatch on this machine"):
        make_engine("slurm", None, None)
    with pytest.raises(ConfigError, match=r"partion: no such option\. Did you mean 'partition'"):
        SlurmEngine(options={"partion": "gpu"}, cluster="local")
