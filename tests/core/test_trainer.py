"""The loop: exact resume, what stops it, what it writes."""

import itertools
import math
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from blobs_domain import BlobsAdapter
from runs import Steeper, assert_same_bits, at_batch, interrupt, lines, only_record, patch_blobs, quiet, weights

import dipole
from dipole import CheckpointError, ConfigError, DipoleError, Pairs, TrainingError, objective
from dipole.benchmarks.suite_results import numbers
from dipole.core.record import read_record
from dipole.core.train.checkpoint import list_checkpoints, load_checkpoint, starting_state
from dipole.core.train.metrics import read_metrics
from dipole.core.train.recipe import load_recipe
from dipole.core.train.run import RunInterruptedError, train
from dipole.core.train.run_folder import OWNER, RunFolder
from dipole.core.utils.seeding import Seeds
from tests.runs import refused
from tests.systems import file_limit, posix


def test_a_run_learns_and_leaves_what_it_promises(blobs, tmp_path):
    overrides = ["train.steps=60", "train.evaluate_every=30"]
    record = quiet(blobs, *overrides, runs=tmp_path)
    folder = RunFolder(tmp_path / record.hash)
    left = {each.name for each in folder.path.iterdir() if not each.name.startswith(".")}
    assert left == {"config.toml", "metrics.jsonl", "model", "record.json"}
    assert record == only_record(tmp_path)
    assert (record.status, record.steps, record.epochs) == ("done", 60, 15)
    assert record.negatives_per_anchor == 30  # 32 views, without itself and its other view
    assert record.parameters == 6 * 16 + 16 + 16 * 8 + 8
    assert (record.data["name"], record.seeds["root"], len({*record.seeds.values()})) == ("blobs", 0, 6)
    assert record.versions["torch"] == torch.__version__
    assert record.peak_memory_bytes > 50e6
    written = read_metrics(folder.metrics)
    losses = {line["step"]: line["train/loss"] for line in written if "train/loss" in line}
    assert list(losses) == list(range(3, 61, 3))
    assert losses[60] < losses[3] - 0.3
    assert losses[3] == pytest.approx(written[0]["train/loss.infonce"])
    assert [line["step"] for line in written if "eval/mean/accuracy" in line] == [30, 60]
    assert record.results["mean/accuracy"] == pytest.approx(written[-1]["eval/mean/accuracy"])
    assert folder.read_config() == load_recipe(blobs, overrides).config


DOMINATED = "objective=infonce + 50*dp(reduction=anchor_sum)"  # which is said in the notes
TEMPERATURE = "train.schedule.infonce.temperature=exponential(1, 0.1, start=2, end=8)"


@pytest.mark.parametrize("overrides", [
    (), ("blobs.queue=24", "train.optimizer=sgd", "train.schedule=cosine", "train.warmup=2"),
    ("objective=infonce(similarity=bilinear)+0.1*cllr(dim=8, solver=proximal)", "train.optimizer=adamw"),
    ("train.optimizer=lars", "train.clip=0.1", "objective=infonce+dp"),
    ("objective=infonce(temperature=learned, init=0.07)", "train.best_by=mean/accuracy"),
    ("train.best_by=-mean/accuracy",),  # the smallest comes first, before the interruption
    ("train.microbatch=5", "blobs.queue=24"), ("train.activation_checkpointing=true",), ("train.precision=16-mixed",),
    ("objective=infonce+dp", TEMPERATURE, 'train.schedule."dp.weight"=[[0, 0], [4, 0.2], [8, 0.1]]'),
    (DOMINATED, "train.steps=60"), (DOMINATED, "train.steps=60", "train.best_by=mean/accuracy"),
])  # fmt: skip
def test_resume_is_bit_exact(blobs, tmp_path, monkeypatch, overrides):
    overrides = ("train.evaluate_every=4", *overrides)
    whole = quiet(blobs, *overrides, runs=tmp_path / "whole")
    folder = interrupt(monkeypatch, blobs, *overrides, runs=tmp_path / "parts", at=5 if len(overrides) % 2 else 4)
    assert read_record(folder / "record.json").status == "interrupted"
    parts = quiet(blobs, *overrides, runs=tmp_path / "parts")
    assert parts.status == "done"
    assert whole.notes or DOMINATED not in overrides
    names = {"results", "chosen", "notes", "diagnostics"}
    assert parts.model_dump(include=names) == whole.model_dump(include=names)
    assert_same_bits(tmp_path / "whole", tmp_path / "parts")


def test_resume_drops_lines_written_after_the_checkpoint(blobs, tmp_path, monkeypatch):
    overrides = ("train.checkpoint_every=4", "train.log_every=1")
    quiet(blobs, *overrides, runs=tmp_path / "whole")
    at_batch(monkeypatch, {7: lambda: 1 / 0})
    refused(ZeroDivisionError, None, quiet, blobs, *overrides, runs=tmp_path / "parts")
    record = only_record(tmp_path / "parts")
    assert (record.status, record.error) == ("failed", "ZeroDivisionError('division by zero')")
    with open(tmp_path / "parts" / record.hash / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "train/lo')
    quiet(blobs, *overrides, runs=tmp_path / "parts")
    assert [line["step"] for line in lines(tmp_path / "parts")] == [*range(1, 11), 10]
    assert lines(tmp_path / "whole") == lines(tmp_path / "parts")


def test_seeds_and_not_evaluations_change_everything_that_is_random(blobs, tmp_path):
    found = []
    for number, overrides in enumerate((["seed=1"], ["train.log_every=5"], ["train.evaluate_every=1"], ["seed=2"])):
        results = quiet(blobs, "seed=1", *overrides, runs=tmp_path / str(number)).results
        found.append((results, weights(tmp_path / str(number))))
    (results, one), (_, same), (of_often, often), (_, two) = found
    assert all(torch.equal(one[name], same[name]) and torch.equal(one[name], often[name]) for name in one)
    assert not any(torch.equal(one[name], two[name]) for name in one)
    assert of_often == results


def test_seconds_of_steps_are_told_from_those_of_evaluations(blobs, tmp_path, monkeypatch):
    plain, pause, seen = BlobsAdapter.evaluate, 0.2, []

    def wait_and_stop_once(index: int) -> None:
        seen.append(index)
        time.sleep(0.03)
        if len(seen) == 5:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(BlobsAdapter, "evaluate", lambda *given: time.sleep(pause) or plain(*given))
    patch_blobs(monkeypatch, "on_batch", wait_and_stop_once)
    refused(RunInterruptedError, "after step 5 of 10", quiet, blobs, "train.evaluate_every=4", runs=tmp_path)
    begun = only_record(tmp_path)
    assert 5 * 0.03 <= begun.training_seconds <= begun.wall_seconds - pause  # one evaluation, after step 4
    record = quiet(blobs, "train.evaluate_every=4", runs=tmp_path)
    assert begun.training_seconds + 5 * 0.03 <= record.training_seconds <= record.wall_seconds - 3 * pause
    assert numbers(record)["cost/seconds_per_step"] == pytest.approx(record.training_seconds / 10)
    earlier = record.model_copy(update={"training_seconds": None})
    assert numbers(earlier)["cost/seconds_per_step"] == pytest.approx(record.wall_seconds / 10)


def test_trained_as_the_plain_loop_trains(blobs, tmp_path):
    overrides = ("blobs.dropout=0", "objective=infonce(temperature=0.3)+0.2*dp", "train.clip=0.5", "train.warmup=4")
    quiet(blobs, *overrides, runs=tmp_path / "runs")
    seeds, cpu = Seeds(0), torch.device("cpu")
    torch.manual_seed(seeds.model)
    settings = load_recipe(blobs, overrides).config.settings
    adapter = BlobsAdapter(settings, seed=seeds, device=cpu, workdir=tmp_path, batch_size=16)
    loss_of = objective("infonce(temperature=0.3)+0.2*dp")
    optimizer = torch.optim.Adam(adapter.module.parameters(), foreach=False)
    batches = itertools.chain.from_iterable(adapter.batches(epoch) for epoch in range(3))
    for step, batch in enumerate(itertools.islice(batches, 10), 1):
        optimizer.param_groups[0]["lr"] = 0.01 * min(1, step / 4)
        optimizer.zero_grad()
        loss_of(adapter.embed(batch)).loss.backward()
        torch.nn.utils.clip_grad_norm_(adapter.module.parameters(), 0.5)
        optimizer.step()
    wanted = {f"module.{name}": tensor for name, tensor in adapter.module.state_dict().items()}
    found = {name: tensor for name, tensor in weights(tmp_path / "runs").items() if name in wanted}
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_finished_run_is_not_run_again_and_two_processes_cannot_train_one(blobs, tmp_path, monkeypatch):
    config = load_recipe(blobs).config
    other = RunFolder(tmp_path / config.hash)
    other.open(config)
    said = rf"another process \(pid {os.getpid()}\) is training this run"
    refused(TrainingError, said, train, config, tmp_path, quiet=True)
    other.close()
    first = train(config, tmp_path, quiet=True)
    assert first.status == "done"
    at_batch(monkeypatch, {1: lambda: 1 / 0})
    assert quiet(blobs, "name=renamed", runs=tmp_path) == first
    refused(ZeroDivisionError, None, quiet, blobs, runs=tmp_path, overwrite=True)


@pytest.mark.parametrize(("precision", "spoil", "said"), [
    ("32", lambda z: z + torch.zeros(2**58)[:1], r"out of memory at step 1: set train\.microbatch"),
    ("32", lambda z: Steeper.apply(z, math.inf), r"step 1: the gradient norm is nan.*inside the encoder"),
    (
        "16-mixed",
        lambda z: Steeper.apply(z, math.inf),
        "step 18: the gradient norm is nan while the loss is finite",
    ),
    ("16-mixed", lambda z: z * math.nan, "step 1: the loss is not finite"),
])  # fmt: skip
def test_what_a_step_cannot_do_is_one_message(blobs, tmp_path, monkeypatch, precision, spoil, said):
    """In float16 a step is left out while a smaller scale may help, and no longer."""
    patch_blobs(monkeypatch, "spoil", spoil)
    refused(TrainingError, said, quiet, blobs, f"train.precision='{precision}'", "train.steps=40", runs=tmp_path)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_loss_stops_before_the_step_and_names_the_term(blobs, tmp_path, monkeypatch, value):
    seen = []

    def spoil(z: torch.Tensor) -> torch.Tensor:
        seen.append(z)
        return torch.where(torch.arange(len(z))[:, None] == 3, value, z) if len(seen) == 6 else z

    patch_blobs(monkeypatch, "spoil", spoil)
    overrides = ("train.checkpoint_every=5", "objective=infonce(similarity=dot)+0.1*dp")
    said = r"step 6: the loss is not finite in the terms? .*'infonce'.*1 of 32 embeddings are not finite: look at"
    with pytest.raises(TrainingError, match=said) as caught:
        quiet(blobs, *overrides, runs=tmp_path)
    record = only_record(tmp_path)
    assert (record.status, record.error) == ("failed", str(caught.value))
    (checkpoint,) = list_checkpoints(tmp_path / record.hash / "checkpoints")
    assert load_checkpoint(checkpoint)["step"] == 5
    # The cause removed, the run goes on from there.
    patch_blobs(monkeypatch, "spoil", lambda z: z)
    assert quiet(blobs, *overrides, runs=tmp_path).status == "done"


def test_checkpoints_of_an_unfinished_run(blobs, tmp_path, monkeypatch):
    overrides = ("train.checkpoint_every=2",)
    quiet(blobs, *overrides, runs=tmp_path / "whole")
    folder = interrupt(monkeypatch, blobs, *overrides, runs=tmp_path / "parts", at=9, signum=signal.SIGTERM)
    older, newest = list_checkpoints(folder / "checkpoints")
    assert (load_checkpoint(newest)["step"], load_checkpoint(older)["step"]) == (9, 8)
    # The newest is cut short: the one before it continues the run, to the same end.
    with open(newest, "rb+") as file:
        file.truncate(newest.stat().st_size - 100)
    damaged = "truncated or damaged"
    refused(CheckpointError, damaged, quiet, blobs, *overrides, runs=tmp_path / "parts", resume=newest)
    assert starting_state(newest.parent, folder.name, folder, print)["step"] == 8  # --resume FOLDER
    assert quiet(blobs, *overrides, runs=tmp_path / "parts").status == "done"
    assert_same_bits(tmp_path / "whole", tmp_path / "parts")


def test_checkpoint_of_another_configuration_is_refused(blobs, tmp_path, monkeypatch):
    interrupt(monkeypatch, blobs, runs=tmp_path)
    (checkpoint,) = tmp_path.glob("*/checkpoints/*.safetensors")
    for seed, resume, said in (
        (3, checkpoint, "belongs to another run"),
        (3, checkpoint.parents[1], "belongs to another run"),
        (0, Path("nowhere.safetensors"), "no checkpoint"),
        (0, tmp_path, "there is no checkpoint in the folder"),
        (0, "foo", r"resume must be 'auto', 'never' or the Path .* got 'foo'"),
    ):
        refused((CheckpointError, ConfigError), said, quiet, blobs, f"seed={seed}", runs=tmp_path, resume=resume)
    record = quiet(blobs, runs=tmp_path, resume="never")
    assert dipole.train(load_recipe(blobs).config, str(tmp_path)).updated == record.updated  # finished: not run again
    assert quiet(blobs, runs=tmp_path, resume=checkpoint) == record
    refused(CheckpointError, "no checkpoint", quiet, blobs, runs=tmp_path, resume=Path("nowhere.safetensors"))
    refused(ConfigError, "unknown tracker 'wandbb'.*'wandb'", quiet, blobs, runs=tmp_path, log="tensorboard, wandbb")
    for log, said in ((None, "log must be names of trackers"), ([3], "unknown tracker '3'")):
        refused(ConfigError, said, quiet, blobs, runs=tmp_path, log=log)
    folder = dipole.find_run(record.hash[:6], str(tmp_path))
    assert dipole.load_run(folder)[0] == record
    (tmp_path / "moved").mkdir()
    renamed = folder.path.rename(tmp_path / "moved" / "my run")
    assert dipole.find_run("my run", tmp_path / "moved").path == renamed
    refused(ConfigError, r"load_recipe\(...\)\.config", dipole.train, blobs)
    refused(ConfigError, "find_run", dipole.load_run, renamed)
    refused(ConfigError, "a run is the path of its folder or the first digits of its hash, got 3", dipole.find_run, 3)
    refused(ConfigError, "runs must be the folder of all runs, got None", dipole.find_run, "ab", None)
    refused(ConfigError, "a recipe is its name or the path of a .toml file, got a dict", dipole.load_recipe, {})
    refused(ConfigError, r'such as \["train.steps=5"\], got .seed=1', dipole.load_recipe, blobs, "seed=1")
    refused(ConfigError, r"a text such as .*, got \('seed', 1\)", dipole.load_recipe, blobs, [("seed", 1)])
    refused(ConfigError, "runs must be the folder of all runs, got None", dipole.train, load_recipe(blobs).config, None)


@posix
@pytest.mark.parametrize("name", ["metrics.jsonl", OWNER, ".lock"])
def test_what_a_received_folder_has_in_place_of_our_files_is_not_written_to(blobs, tmp_path, name):
    """A pipe would be waited for without end. What a link leads to would be cut back to nothing."""
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    folder = tmp_path / "runs" / load_recipe(blobs).config.hash
    folder.mkdir(parents=True)
    for place in (lambda: os.mkfifo(folder / name), lambda: (folder / name).symlink_to(mine)):
        place()
        with pytest.raises(TrainingError, match=rf"cannot write .*{name}: it is not a regular file\. Remove it\."):
            quiet(blobs, runs=tmp_path / "runs")
        (folder / name).unlink()
    assert mine.read_text() == "mine"
    assert quiet(blobs, runs=tmp_path / "runs").status == "done"


@pytest.mark.parametrize(("setting", "error", "said"), [
    ("train.batch_size=65", ConfigError, "more than one epoch"),
    ("device=cuda:103", ConfigError, r"device: 'cuda:103' is not here .*\"auto\" or \"cpu\""),
    ("seed=1", TrainingError, r"epoch 0 gave 3 batches .* where 4 were announced"),
])  # fmt: skip
def test_what_does_not_fit_is_one_message(blobs, tmp_path, monkeypatch, setting, error, said):
    batches = BlobsAdapter.batches
    monkeypatch.setattr(BlobsAdapter, "batches", lambda self, epoch, start=0: list(batches(self, epoch, start))[:-1])
    refused(error, said, quiet, blobs, setting, runs=tmp_path)


def test_runs_folder_that_cannot_be_written(blobs, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(TrainingError, match=r"cannot write the run folder .*file.*choose another folder with --runs"):
        quiet(blobs, runs=tmp_path / "file")
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    if not os.access(folder, os.W_OK):  # root may write anywhere
        refused(TrainingError, "No permission", quiet, blobs, runs=folder)


def test_a_domain_with_its_own_loop(blobs, tmp_path, monkeypatch):
    def fit(self: Any, run: Any) -> None:
        while run.step < run.total_steps:
            self.queue = self.queue + torch.rand(())
            if run.step == self.stop_at:
                signal.raise_signal(signal.SIGINT)
            run.advance({"train/total": float(self.queue.sum())}, steps=2)

    fields = frozenset({"steps", "batch_size", "checkpoint_every", "log_every"})
    for name, value in {"fit": fit, "train_fields": fields, "objective_optional": True, "stop_at": -1}.items():
        monkeypatch.setattr(BlobsAdapter, name, value, raising=False)
    recipe, table = tmp_path / "own.toml", "[train]\nsteps=12\nlog_every=4\nbatch_size=16\n[blobs]\nqueue=3"
    recipe.write_text(f'domain="blobs"\nobjective="none"\n{table}')
    quiet(recipe, runs=tmp_path / "whole")
    BlobsAdapter.stop_at = 6
    refused(RunInterruptedError, None, quiet, recipe, runs=tmp_path / "parts")
    BlobsAdapter.stop_at = -1
    quiet(recipe, runs=tmp_path / "parts")
    assert lines(tmp_path / "whole") == lines(tmp_path / "parts")
    assert [line["step"] for line in lines(tmp_path / "whole")] == [4, 8, 12, 12]
    refused(
        ConfigError, "train.clip: has no effect in the domain 'blobs'", quiet, recipe, "train.clip=1", runs=tmp_path
    )


@pytest.mark.parametrize("negatives", [(), (1,)], ids=["never", "once"])
def test_a_term_that_stays_0_is_said_and_recorded(blobs, tmp_path, monkeypatch, capsys, negatives):
    steps = itertools.count()

    def embed(self: Any, batch: Any) -> Pairs:
        z1, z2 = self.module(batch[0].flatten(0, 1)).chunk(2)
        return Pairs.cross(z1, z2, batch_negatives=next(steps) in negatives)

    monkeypatch.setattr(BlobsAdapter, "embed", embed)
    overrides = ("objective=infonce+0.1*hcl", "train.log_every=2")
    interrupt(monkeypatch, blobs, *overrides, runs=tmp_path)
    told = capsys.readouterr().err.count("the term 'infonce' has been 0: no anchor has a negative")
    notes = [note.partition(":")[0] for note in quiet(blobs, *overrides, runs=tmp_path).notes]
    expected = [] if negatives else [f"the term {name!r} has been 0" for name in ("infonce", "hcl")]
    assert (told, notes) == (not negatives, expected)


@posix
def test_failure_while_the_disk_is_full_is_still_one_message(blobs, tmp_path, monkeypatch):
    runs = tmp_path / "runs"
    with ExitStack() as stack:
        at_batch(monkeypatch, {5: lambda: stack.enter_context(file_limit(4000))})
        with pytest.raises(DipoleError, match=r"cannot save the checkpoint of step 8.*large.*step 4 is intact"):
            quiet(blobs, "train.checkpoint_every=4", runs=runs)
    record = only_record(runs)
    (checkpoint,) = (runs / record.hash / "checkpoints").iterdir()
    assert (load_checkpoint(checkpoint)["step"], record.status) == (4, "failed")
    assert quiet(blobs, "train.checkpoint_every=4", runs=runs).status == "done"


def test_a_run_gives_pytorchs_determinism_back(blobs, tmp_path):
    try:
        for mode, setting in itertools.product((0, 2), ("true", "false")):
            torch.set_deterministic_debug_mode(mode)
            quiet(blobs, f"deterministic={setting}", "train.steps=2", runs=tmp_path / str(mode))
            assert torch.get_deterministic_debug_mode() == mode
    finally:
        torch.set_deterministic_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
def test_resume_on_a_gpu(blobs, tmp_path, monkeypatch, precision):
    overrides = ("device=cuda", "deterministic=true", "blobs.queue=24", f"train.precision='{precision}'")
    whole = quiet(blobs, *overrides, runs=tmp_path / "whole")
    interrupt(monkeypatch, blobs, *overrides, runs=tmp_path / "parts")
    parts = quiet(blobs, *overrides, runs=tmp_path / "parts")
    assert whole.peak_device_bytes
    assert parts.results["mean/accuracy"] == pytest.approx(whole.results["mean/accuracy"])
    torch.testing.assert_close(weights(tmp_path / "parts"), weights(tmp_path / "whole"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("term", "rate", "said"), [
    ("cllr", 0.02, "cllr: L has vanished"), ("cllr(alpha=0)", 0.1, "cllr: L is a multiple of the identity"),
    ("1*cllr(alpha=0.3, features=unit, norm=nuclear, solver=proximal)", 0.1, ""),
])  # fmt: skip
def test_what_becomes_of_a_projection_is_said_and_recorded_once(blobs, tmp_path, capsys, term, rate, said):
    plain = ("train.optimizer=sgd", "train.momentum=0", "train.evaluate_every=50", "train.checkpoint_every=50")
    overrides = (f"objective=infonce + {term}", f"train.learning_rate={rate}", "train.steps=150", *plain)
    record = quiet(blobs, *overrides, runs=tmp_path)
    shown = [line for line in capsys.readouterr().err.splitlines() if "cllr: L" in line]
    assert len(shown) == len(record.notes) == bool(said)
    assert all(line.startswith(f"warning: {said}") for line in (*shown, *(f"warning: {note}" for note in record.notes)))
    found = record.diagnostics
    assert {"effective_rank", "cllr.effective_rank", "cllr.norm", "cllr.error", "cllr.data_rank"} <= found.keys()
    assert "diag/cllr.effective_rank" in lines(tmp_path)[-1]
    assert said or (0 < found["cllr.rank"] < 8 and found["cllr.effective_rank"] < 8)
