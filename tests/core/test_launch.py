"""Several processes: how the environment names them, what ends them together, and which may go on."""

import json
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from blobs_domain import BlobsAdapter
from runs import assert_same_bits, at_batch, done, lines, only_record, quiet, refused, wait_for, weights
from torch import nn

from dipole.benchmarks.run import worker
from dipole.core.train.checkpoint import same, unsupported_reason
from dipole.core.train.launch import launch, pick_device
from dipole.core.train.metrics import read_metrics
from dipole.core.train.recipe import load_recipe
from dipole.core.train.run import RunInterruptedError
from dipole.core.train.signals import HANDLED
from dipole.core.utils import process
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.launched import first_node, launched
from dipole.core.utils.process import describe_self, is_gone
from tests.ranks import Python
from tests.runs import refused as fails
from tests.systems import POSIX, posix

SLOWLY = {"OMP_NUM_THREADS": "1", "BLOBS_SECONDS": "0.05"}
SETTINGS = ("blobs.dropout=0", "train.steps=60", "train.log_every=1", "train.evaluate_every=20", "train.clip=1")
SETTINGS += ("objective=infonce(temperature=0.2)+0.3*dp+0.1*cllr",)


def test_a_process_alone_and_one_of_torchrun(monkeypatch, capsys):
    listed = ("node07", "gpu[03-07,12],cpu1", "a,b[1-2]", "rack[2-3]node[10,11].site", "n[5]")
    assert [first_node(each) for each in listed] == ["node07", "gpu03", "a", "rack2node10.site", "n5"]
    assert launched({}).size == launched({"WORLD_SIZE": "8"}).size == 1  # left over: nobody says which one this is
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h"}
    slurm = {"MASTER_PORT": "7", "TORCHELASTIC_USE_AGENT_STORE": "True", "SLURM_PROCID": "0"}
    here = launched(torchrun | slurm | {"SLURM_STEP_NUM_TASKS": "4"})
    assert (here.rank, here.size, here.local_rank, here.local_size) == (3, 8, 1, 2)
    assert (here.address, here.port, here.hosted) == ("h", 7, True)
    for rank, said in (("x", "RANK = 'x'"), ("2", "number 2 of 2")):
        for name, value in {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "h"}.items():
            monkeypatch.setenv(name, value)
        assert said in refused(capsys, "train", "digits-simclr", "--print-config")


def test_steps_of_srun_and_the_script_of_sbatch():
    job = {"SLURM_NTASKS": "5", "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[08-10]", "SLURM_NNODES": "3"}
    job |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "ENVIRONMENT": "BATCH"}
    assert launched(job).size == 1
    task = job | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "5", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    ranks = [
        launched(task | {"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n % 2), "SLURM_NODEID": str(n // 2)})
        for n in range(5)
    ]
    assert [(each.rank, each.local_rank, each.local_size) for each in ranks] == [
        (0, 0, 2), (1, 1, 2), (2, 0, 2), (3, 1, 2), (4, 0, 2),
    ]  # fmt: skip
    assert {(each.address, each.port, each.hosted) for each in ranks} == {("n08", ranks[0].port, False)}
    assert 1024 < ranks[0].port < 65536
    assert launched(task | {"SLURM_STEP_ID": "1"}).port != ranks[0].port
    alone = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_JOB_NODELIST": "n1"}
    assert launched(alone).address == "127.0.0.1"
    assert launched({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}).rank == 1


def test_a_process_that_is_gone_is_known():
    mine = json.loads(describe_self())
    assert not is_gone(json.dumps(mine))
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    # A number may have been given to another process.
    for gone in ({"pid": child.pid}, {"began": "1"}, {"boot": "an earlier one"}):
        assert is_gone(json.dumps(mine | gone))
    for other in ({"host": "elsewhere"}, {"namespace": "pid:[1]"}):
        assert not is_gone(json.dumps(mine | {"pid": child.pid} | other))
    assert not any(map(is_gone, ("", "4711", "[]", '{"pid": "x"}', "null")))


@pytest.mark.parametrize(("variables", "setting", "said"), [
    ("ACCELERATE_USE_FSDP=true", "seed=0", "FSDP .*train.microbatch"),
    ("ACCELERATE_USE_DEEPSPEED=true", "seed=0", "DeepSpeed"),
    ("ACCELERATE_USE_MEGATRON_LM=true", "seed=0", "Megatron"), ("PJRT_DEVICE=TPU", "seed=0", "TPU"),
    ("ACCELERATE_MIXED_PRECISION=bf16", "seed=0", "--set train.precision=bf16-mixed"),
    ("ACCELERATE_MIXED_PRECISION=fp16", "train.precision=bf16-mixed", "--set train.precision=16-mixed"),
    ("ACCELERATE_DYNAMO_BACKEND=INDUCTOR", "seed=0", "train.compile=true"),
    ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4", "seed=0", "train.microbatch=ROWS"),
    ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=h", "device=cuda:0", "cuda:0"),
])  # fmt: skip
def test_what_a_launcher_asks_for_and_the_loop_would_leave_out(blobs, monkeypatch, variables, setting, said):
    for each in variables.split():
        monkeypatch.setenv(*each.split("="))
    fails(ConfigError, said, launch, load_recipe(blobs, [setting]).config)


def test_accelerates_own_words_for_what_the_recipe_says_and_devices_that_are_none(blobs, monkeypatch):
    for name, value in {"MIXED_PRECISION": "bf16", "USE_CPU": "True", "DYNAMO_BACKEND": "NO"}.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    processes = launch(load_recipe(blobs, ["train.precision=bf16-mixed"]).config)
    assert (processes.device.type, processes.size) == ("cpu", 1)
    fails(ConfigError, "accelerate launch --cpu", pick_device, "cuda")
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    for name in ("tpu", "meta", "cuda:-1", "CPU", ""):
        fails(ConfigError, f"device: '{name}' is none. Allowed: auto, cpu, cuda, cuda:1, mps", pick_device, name)


@pytest.mark.parametrize("which", [each for each in HANDLED if each != signal.SIGINT])
@pytest.mark.parametrize("times", [1, 2], ids=["in an evaluation on the way", "in the last one"])
def test_a_signal_in_an_evaluation_puts_it_off(blobs, tmp_path, monkeypatch, which, times):
    """It is not waited for. The next attempt makes it, and every number is that of an uninterrupted run."""
    overrides = ("train.evaluate_every=5", "blobs.queue=8")
    whole = quiet(blobs, *overrides, runs=tmp_path / "whole")
    evaluate, seen = BlobsAdapter.evaluate, []

    def interrupted(self: Any, objective: Any) -> dict[str, float]:
        seen.append(objective)
        if len(seen) == times:
            torch.rand(3)
            signal.raise_signal(which)
        return evaluate(self, objective)

    monkeypatch.setattr(BlobsAdapter, "evaluate", interrupted)
    with pytest.raises(RunInterruptedError, match=f"after step {5 * times} of 10; the checkpoint") as caught:
        quiet(blobs, *overrides, runs=tmp_path / "parts")
    assert (caught.value.exit_code, only_record(tmp_path / "parts").status) == (75, "interrupted")
    parts = quiet(blobs, *overrides, runs=tmp_path / "parts")
    monkeypatch.setattr(BlobsAdapter, "evaluate", evaluate)
    assert (parts.results, parts.diagnostics, parts.histogram) == (whole.results, whole.diagnostics, whole.histogram)
    assert_same_bits(tmp_path / "whole", tmp_path / "parts")


def test_what_keeps_another_number_of_ranks_from_going_on():
    plain, normed = nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2))
    alike, other = {"drew": False, "adapter": {"seen": torch.ones(2)}}, {"adapter": {"seen": torch.zeros(2)}}
    assert unsupported_reason([alike, alike], plain, False) == ""
    assert "dropout" in unsupported_reason([alike, alike | {"drew": True}], plain, False)
    assert "of its own" in unsupported_reason([alike, alike | other], plain, False)
    assert "batch norm" in unsupported_reason([alike], normed, False)
    assert unsupported_reason([alike], normed, True) == unsupported_reason([alike], normed.eval(), False) == ""
    assert same([{"a": torch.ones(1)}], [{"a": torch.ones(1)}])
    assert not same([torch.ones(1)], [1.0])


def srun(folder: Path, *arguments: object, **more: str) -> list[Python]:
    """Two tasks, with what a step of SLURM gives them."""
    step = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0", "SLURM_NNODES": "1"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        step |= {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node[1-2]", "MASTER_PORT": str(free.getsockname()[1])}
    start = partial(Python, "-m", "blobs_domain", *arguments, cwd=folder, **step, **SLOWLY, **more)
    return [start(SLURM_PROCID=rank, SLURM_LOCALID=rank) for rank in "01"]


@posix
def test_errors_are_told_once_a_signal_to_one_rank_ends_both_at_one_step_and_one_process_goes_on(blobs, tmp_path):
    wrong = {"train.batch_sise=8": "train.batch_sise", "train.batch_size=15": "15 cannot be divided among 2 ranks"}
    first = "\n".join(f"train {blobs} --set {setting}" for setting in wrong)
    ranks = srun(tmp_path, "train", blobs, "--runs", "parts", "--set", *SETTINGS, BLOBS_FIRST=first)
    wait_for(lambda: sum(len(read_metrics(path)) for path in tmp_path.glob("parts/*/metrics.jsonl")) > 5, *ranks)
    ranks[1].send_signal(signal.SIGUSR1)
    said = "".join(rank.communicate(timeout=100)[1] for rank in ranks)
    assert [(rank.returncode, rank.stdout.split()) for rank in ranks] == [(75, ["2", "2"])] * 2, said
    assert [said.count(each) for each in (*wrong.values(), "error:")] == [1, 1, 3]
    assert said.count("the checkpoint is saved. Repeat the command to continue.") == 1
    assert "Traceback" not in said
    record = only_record(tmp_path / "parts")
    assert (record.status, record.hardware.world_size, record.negatives_per_anchor) == ("interrupted", 2, 30)
    assert 5 < record.steps < 60
    assert quiet(blobs, *SETTINGS, runs=tmp_path / "parts").hardware.world_size == 1
    quiet(blobs, *SETTINGS, runs=tmp_path / "whole")
    names = "step", "train/loss", "grad/dp", "grad/cllr"
    for line, other in zip(lines(tmp_path / "whole"), lines(tmp_path / "parts"), strict=True):
        one, two = ({name: each[name] for name in names if name in each} for each in (line, other))
        assert one == pytest.approx(two, rel=1e-3)
    torch.testing.assert_close(weights(tmp_path / "parts"), weights(tmp_path / "whole"), rtol=1e-3, atol=1e-5)


@posix
def test_launchers_pass_on_what_came_already(blobs, tmp_path, monkeypatch):
    at_batch(monkeypatch, {3: lambda: list(map(signal.raise_signal, (signal.SIGUSR1, signal.SIGTERM)))})
    fails(RunInterruptedError, "after step 3 of 10; the checkpoint is saved", quiet, blobs, runs=tmp_path)


def test_a_signal_before_the_first_step_ends_at_once(blobs, monkeypatch, capsys):
    made, before = BlobsAdapter.__init__, signal.getsignal(signal.SIGTERM)

    def prepare(self: Any, *args: Any, **more: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        made(self, *args, **more)

    remark = lambda _: signal.raise_signal(signal.SIGTERM) or []  # noqa: E731
    for name, function, said in (
        ("__init__", prepare, "interrupted before the first step"), ("remarks", remark, "after step 0"),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(BlobsAdapter, name, function)
            assert said in refused(capsys, "train", blobs, "--quiet", code=75)
        assert signal.getsignal(signal.SIGTERM) is before
    assert only_record(Path("runs")).status == "interrupted"
    done(capsys, "train", blobs, "--quiet")


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
