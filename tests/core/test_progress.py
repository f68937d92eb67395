"""What a run says on stderr and to trackers, which hear every line once and need no network."""

import importlib.util
import io
import itertools
import json
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import at_batch, lines, quiet, refused

from dipole.core.cli import main
from dipole.core.train import trackers
from dipole.core.train.run import RunInterruptedError
from dipole.core.utils import progress
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.progress import Progress, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# A kernel's stderr is no terminal, and shows what follows a carriage return in place of the line.
Notebook = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})


@pytest.fixture
def shown_on(monkeypatch):
    """Make a stream the stderr, with a clock that goes on by so many seconds each time it is read."""

    def use(stream, seconds=1):
        clock = itertools.count(0, seconds)
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
        return stream

    return use


def run(stream: io.StringIO, quiet: bool = False) -> str:
    shown = Progress(quiet)
    shown.start("blobs [0]", 100, 40)
    for step in range(41, 51):
        shown.values({"train/loss": 2.5})
        shown.update(step)
    shown.status("evaluating")
    shown.note("step 50: accuracy [1] 0.5")
    shown.warn("warning: something")
    shown.close(50)
    shown.close()
    return stream.getvalue()


def test_plain_lines_come_now_and_then_and_name_the_time_left(monkeypatch, shown_on):
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"):
        monkeypatch.setenv(name, "1")  # no bar is drawn into a pipe, whatever asks for colours
    text = run(shown_on(io.StringIO(), 4))
    lines = text.splitlines()
    assert 2 <= sum(line.startswith("step 4") for line in lines) <= 5
    assert lines[0] == "step 43/100  loss 2.5"  # of two steps nothing is reckoned
    assert lines[1] == "step 46/100  loss 2.5  about 3m36s left"
    assert lines[-2:] == ["step 50: accuracy [1] 0.5", "warning: something"]
    monkeypatch.setenv("TERM", "dumb")
    dumb = run(shown_on(Terminal(), 4))
    assert dumb.startswith("step 43/100  loss 2.5\n")
    assert "\x1b" not in text + dumb


def test_terminals_get_a_bar_and_quiet_keeps_only_warnings(shown_on):
    assert run(shown_on(io.StringIO(), 4), quiet=True) == "warning: something\n"
    text = run(shown_on(Terminal(), 4))
    assert "50/100" in text
    assert "step 50: accuracy [1] 0.5" in text


def test_no_time_is_reckoned_from_what_comes_before_the_first_step(monkeypatch):
    """An hour of evaluating, compiling and caching, then steps of five seconds."""
    stream, now = io.StringIO(), 0.0
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    shown = Progress()
    shown.start("blobs", 100, 0)
    now += 3600
    for step in range(1, 11):
        shown.update(step)
        now += 5
    lines = stream.getvalue().splitlines()
    assert (lines[0], lines[-1]) == ("step 1/100", "step 9/100  about 7m35s left")


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_a_stream_that_takes_nothing_ends_no_work(stream, monkeypatch, capsys):
    if stream is not None:
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    shown = Progress()
    shown.start("blobs", 10, 0)
    shown.update(1)
    shown.warn("warning: something")
    shown.close(1)
    assert capsys.readouterr().out == ""


def test_a_notebook_gets_one_line_that_is_written_over(shown_on):
    stream, shown = shown_on(Notebook()), Progress()
    shown.start("blobs", 100, 0)
    for step, loss in ((1, 2.123), (2, 2.0)):
        shown.values({"train/loss": loss})
        shown.update(step)
    shown.note("step 2: accuracy 0.5")
    shown.update(3)
    shown.close()
    shown.close()
    line, *rest = stream.getvalue().split("\n")
    first, second = line.split("\r")[1:]
    assert first.startswith("step 1/100  loss 2.123")
    assert second.startswith("step 2/100  loss 2  ")
    assert len(second) >= len(first)  # nothing of the longer line stays
    assert rest[0] == "step 2: accuracy 0.5"
    assert rest[1].startswith("\rstep 3/100")
    assert rest[2:] == [""]


def test_a_notebook_says_what_takes_a_while(shown_on):
    stream, shown = shown_on(Notebook()), Progress()
    shown.start("SentEval", 2, 0, "task")
    shown.status("encoding 40 sentences")
    shown.status("scoring CR")
    shown.close()
    Progress(quiet=True).status("nothing")
    assert stream.getvalue() == f"\rencoding 40 sentences\r{'scoring CR':<21}\n"


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0s"), (42.4, "42s"), (130, "2m10s"), (7300, "2h01m")])
def test_durations(seconds, text):
    assert duration(seconds) == text


SETTINGS = ("train.log_every=1", "train.evaluate_every=4", "train.checkpoint_every=3")


def in_three_parts(recipe: Path, runs: Path, monkeypatch: pytest.MonkeyPatch, *log: str) -> Any:
    """A crash after step 5 (of which the checkpoint of step 3 knows nothing), a signal, and the rest."""
    at_batch(monkeypatch, {6: lambda: 1 / 0, 11: lambda: signal.raise_signal(signal.SIGTERM)})
    for error in (ZeroDivisionError, RunInterruptedError):
        with pytest.raises(error):
            quiet(recipe, *SETTINGS, runs=runs, log=log)
    return quiet(recipe, *SETTINGS, runs=runs, log=log)


def told_in(runs: Path) -> Counter[tuple[str, int]]:
    found = [(name, line["step"]) for line in lines(runs) for name, v in line.items() if "/" in name and v is not None]
    return Counter(found)


def records_of(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format after a header of 7 bytes."""
    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


@pytest.mark.slow
def test_mlflow_in_a_local_store(blobs, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_tracking_uri(None)
    record = in_three_parts(blobs, tmp_path / "runs", monkeypatch, "mlflow")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("dipole").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", f"blobs {record.hash}")
    assert (run.data.params["train.batch_size"], run.data.params["objective"]) == ("16", "infonce")
    assert run.data.params["hash"] == record.hash
    found = Counter(
        (name, each.step) for name in run.data.metrics for each in client.get_metric_history(run.info.run_id, name)
    )
    assert found == told_in(tmp_path / "runs")
    assert run.data.metrics["eval/mean/accuracy"] == record.results["mean/accuracy"]


@pytest.mark.slow
def test_wandb_without_a_network(blobs, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    record = in_three_parts(blobs, tmp_path / "runs", monkeypatch, "wandb")
    wandb.teardown()  # its own process writes the files
    found: Counter[tuple[str, int]] = Counter()
    about: dict[str, set[str]] = {"id": set(), "name": set(), "project": set()}
    settings: dict[str, Any] = {}
    files = sorted((tmp_path / "runs").glob("*/wandb/offline-run-*/*.wandb"))
    assert len(files) >= 3  # one for each part; wandb before 0.31 begins another at the end
    for path in files:
        for data in records_of(path):
            entry = wandb_internal_pb2.Record()
            entry.ParseFromString(data)
            if entry.WhichOneof("record_type") == "run":
                for each in entry.run.config.update:
                    settings[each.key or ".".join(each.nested_key)] = json.loads(each.value_json)
                about["id"].add(entry.run.run_id)
                about["name"].add(entry.run.display_name)
                about["project"].add(entry.run.project)
            if entry.WhichOneof("record_type") == "config":
                for each in entry.config.update:
                    settings[each.key or ".".join(each.nested_key)] = json.loads(each.value_json)
            if entry.WhichOneof("record_type") == "history":
                items = {
                    (item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in entry.history.item
                }
                found.update((name, items["_step"]) for name in items if not name.startswith("_"))
    assert (about["name"], about["project"]) == ({f"blobs {record.hash}"}, {"dipole"})
    assert (len(about["id"]), settings["train.batch_size"], found) == (1, 16, told_in(tmp_path / "runs"))


def test_tensorboard_goes_on_after_a_crash(blobs, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record = in_three_parts(blobs, tmp_path / "runs", monkeypatch, "tensorboard")
    events = EventAccumulator(str(tmp_path / "runs" / record.hash / "tensorboard"))
    events.Reload()
    written = {line["step"]: line["train/loss"] for line in lines(tmp_path / "runs") if "train/loss" in line}
    assert list(written) == list(range(1, 11))
    assert {event.step: event.value for event in events.Scalars("train/loss")} == pytest.approx(written)
    assert [event.step for event in events.Scalars("eval/mean/accuracy")] == [4, 8, 10]


def test_several_at_once_by_the_command(blobs, tmp_path, monkeypatch):
    for name in ("tensorboard", "wandb"):
        pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert main(["train", str(blobs), "--quiet", "--log", "tensorboard,wandb"]) == 0
    (kept,) = tmp_path.glob("runs/*/trackers.json")
    assert json.loads(kept.read_text())["keys"].keys() == {"tensorboard", "wandb"}


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")
def test_trackio(blobs, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    assert in_three_parts(blobs, tmp_path / "runs", monkeypatch, "trackio").status == "done"


def test_what_cannot_be_told_is_said_before_training(blobs, tmp_path, monkeypatch, capsys):
    said = refused(capsys, "train", blobs, "--log", "wandbb")
    assert "unknown tracker 'wandbb'. Did you mean 'wandb'? Allowed: tensorboard" in said
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--log mlflow needs a package that is not installed: pip install .*mlflow"):
        quiet(blobs, *SETTINGS, runs=tmp_path / "runs", log=["mlflow"])
    assert not (tmp_path / "runs").exists()
