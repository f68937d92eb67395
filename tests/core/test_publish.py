"""Output of a run for others: progress on stderr, trackers, model cards and the Hub (a server here). Frozen layers."""

import importlib.util
import io
import itertools
import json
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
import torch
from runs import at_batch, lines, quiet, refused
from torch import nn

from dipole.core.cli import main
from dipole.core.train import metrics
from dipole.core.train.exports import Card, check_push, push, set_licence, write_card
from dipole.core.train.run import RunInterruptedError
from dipole.core.utils import progress
from dipole.core.utils.backbone import NetworkSource, load
from dipole.core.utils.errors import ConfigError, TrainingError
from dipole.core.utils.freezing import fix_unused, freeze, layers
from dipole.core.utils.progress import Progress, duration
from tests.runs import Record
from tests.runs import refused as fails

Terminal = type("Terminal", (io.StringIO,), {"isatty": lambda self: True})
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
    assert run(shown_on(io.StringIO(), 4), quiet=True) == "warning: something\n"
    lines = text.splitlines()
    assert 2 <= sum(line.startswith("step 4") for line in lines) <= 5
    assert lines[0] == "step 43/100  loss 2.5"  # of two steps nothing is reckoned
    assert lines[1] == "step 46/100  loss 2.5  about 3m36s left"
    assert lines[-2:] == ["step 50: accuracy [1] 0.5", "warning: something"]
    monkeypatch.setenv("TERM", "dumb")
    dumb = run(shown_on(Terminal(), 4))
    assert dumb.startswith("step 43/100  loss 2.5\n")
    assert "\x1b" not in text + dumb
    monkeypatch.delenv("TERM")
    bar = run(shown_on(Terminal(), 4))
    assert "50/100" in bar
    assert "step 50: accuracy [1] 0.5" in bar


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
    assert [duration(seconds) for seconds in (-1, 42.4, 130, 7300)] == ["0s", "42s", "2m10s", "2h01m"]


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
    # It says what takes a while.
    stream, shown = shown_on(Notebook()), Progress()
    shown.start("SentEval", 2, 0, "task")
    shown.status("encoding 40 sentences")
    shown.status("scoring CR")
    shown.close()
    Progress(quiet=True).status("nothing")
    assert stream.getvalue() == f"\rencoding 40 sentences\r{'scoring CR':<21}\n"


SETTINGS = ("train.log_every=1", "train.evaluate_every=4", "train.checkpoint_every=3")


def in_three_parts(recipe: Path, runs: Path, monkeypatch: pytest.MonkeyPatch, *log: str) -> Any:
    """A crash after step 5 (of which the checkpoint of step 3 knows nothing), a signal, and the rest."""
    at_batch(monkeypatch, {6: lambda: 1 / 0, 11: lambda: signal.raise_signal(signal.SIGTERM)})
    for error in (ZeroDivisionError, RunInterruptedError):
        fails(error, None, quiet, recipe, *SETTINGS, runs=runs, log=log)
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
    found = Counter()
    for name in run.data.metrics:
        found.update((name, each.step) for each in client.get_metric_history(run.info.run_id, name))
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
    about, settings = set(), {}
    files = sorted((tmp_path / "runs").glob("*/wandb/offline-run-*/*.wandb"))
    assert len(files) >= 3  # one for each part, and one more at the end by wandb before 0.31

    def values(items: Any) -> dict[str, Any]:
        return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}

    for data in itertools.chain.from_iterable(map(records_of, files)):
        entry = wandb_internal_pb2.Record()
        entry.ParseFromString(data)
        kind = entry.WhichOneof("record_type")
        if kind == "run":
            settings |= values(entry.run.config.update)
            about.add((entry.run.run_id, entry.run.display_name, entry.run.project))
        elif kind == "config":
            settings |= values(entry.config.update)
        elif kind == "history":
            items = values(entry.history.item)
            found.update((name, items["_step"]) for name in items if not name.startswith("_"))
    ((_, name, project),) = about
    assert (name, project) == (f"blobs {record.hash}", "dipole")
    assert (settings["train.batch_size"], found) == (16, told_in(tmp_path / "runs"))


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
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    said = "--log mlflow needs a package that is not installed: pip install .*mlflow"
    fails(ConfigError, said, quiet, blobs, *SETTINGS, runs=tmp_path / "runs", log=["mlflow"])
    assert not (tmp_path / "runs").exists()


ABOUT = {"name": "a: name", "objective": "infonce(temperature=0.2)", "results": {"linear/accuracy": 0.25, "lost": None}}
CARD = Card("An encoder.", "import torch", "feature-extraction", "transformers", ("text",), "A note.")


def test_a_card_says_licence_data_objective_and_results(tmp_path):
    from huggingface_hub import ModelCard

    write_card(
        tmp_path, CARD, Record(**ABOUT), {"name": "hub:owner/set", "fingerprint": "f" * 8, "sizes": {"train": 9}}
    )
    set_licence(tmp_path, "cc-by-4.0")
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.license, card.data.library_name) == ("cc-by-4.0", "transformers")
    assert (card.data.datasets, card.data.model_name) == (["owner/set"], "a: name")
    assert [(each.metric_name, each.metric_value) for each in card.data.eval_results] == [("linear/accuracy", 0.25)]
    for said in ("An encoder.", "1 x `infonce`", "| linear/accuracy | 0.2500 |", "train 9", "A note.", "f" * 8):
        assert said in card.text
    for objective in ("none", "gone(x=1)"):  # without results or an objective
        write_card(tmp_path, CARD, Record(objective=objective, results={}), {"name": "/a/folder"})
        assert ModelCard.load(tmp_path / "README.md").data.eval_results is None


def test_a_push_that_cannot_begin_is_refused_before_the_work(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    fails(ConfigError, "you are not logged in", check_push, "me/model")
    fails(ConfigError, "NAME or OWNER/NAME", check_push, "a/b/c")
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    check_push("me/model")


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as an upload of small files asks for."""

    asked: ClassVar[list[tuple[str, str, bytes]]] = []
    refuse = False

    def do_POST(self) -> None:
        body, home = self.rfile.read(int(self.headers.get("Content-Length", 0))), f"http://{self.headers['Host']}"
        self.asked.append(("POST", self.path, body))
        if self.refuse:
            self.reply({"error": "no"}, 403)
        elif self.path.startswith("/api/repos/create"):
            self.reply({"url": f"{home}/me/model", "id": "me/model", "name": "me/model"})
        elif "/preupload/" in self.path:
            said = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            self.reply({"files": [{"path": each["path"], **said} for each in json.loads(body)["files"]]})
        else:
            self.reply({"commitUrl": f"{home}/me/model/commit/1", "commitOid": "1", "success": True})

    def do_GET(self) -> None:
        self.asked.append(("GET", self.path, b""))
        about = {"siblings": [], "private": True, "tags": [], "downloads": 0, "likes": 0}
        code, kind, _ = next((ANSWERS[name] for name in ANSWERS if name in self.path.split("/")), (200, "", ""))
        self.reply({"id": "me/model", "sha": "1", **about}, code, {"X-Error-Code": kind} if kind else {})

    do_HEAD = do_GET  # noqa: N815

    def reply(self, value: object, code: int = 200, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        for name, each in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, each)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def serving(handler):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def hub_at(monkeypatch, tmp_path):
    """Let the Hub be at an address, with an empty cache."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_TOKEN", "hf_x")
    monkeypatch.setenv("NO_PROXY", "*")

    def use(address, offline=False):
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        names = {"ENDPOINT": address, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_CACHE": str(tmp_path / "cache")}
        for name, value in {**names, "HF_HUB_OFFLINE": offline}.items():
            monkeypatch.setattr(constants, name, value)

    return use


def test_a_push_makes_the_repository_and_sends_the_files(hub_at, tmp_path):
    for name in ("README.md", "config.json"):
        (tmp_path / name).write_text("{}")
    hub = type("OneHub", (Hub,), {"asked": []})
    with serving(hub) as address:
        hub_at(address)
        push(tmp_path, "me/model", private=True)
        hub.refuse = True
        said = r"could not be pushed to me/model.*hf upload me/model"
        fails(TrainingError, said, push, tmp_path, "me/model", private=True)
    hub_at("http://127.0.0.1:9")  # without a network
    fails(TrainingError, said, push, tmp_path, "me/model", private=True)
    for made in [json.loads(body) for _, path, body in hub.asked if path.startswith("/api/repos/create")]:
        assert (made["name"], made["organization"]) == ("model", "me")
        assert "private" in (made.get("visibility"), made.get("private") and "private")  # newer clients, older ones
    (commit,) = [body for _, path, body in hub.asked if "/commit/" in path]
    assert all(name in commit for name in (b"config.json", b"README.md"))


ANSWERS = {
    "gated": (403, "GatedRepo", "it is gated: accept its terms"),
    "missing": (401, "RepoNotFound", "no model of that name, or it is private"),
    "revision": (404, "RevisionNotFound", "no such revision"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_the_hub_refuses(hub_at, name):
    with serving(Hub) as address:
        hub_at(address)
        with pytest.raises(ConfigError, match=ANSWERS[name][2]) as error:
            load(NetworkSource(f"{name}/model", "text.transformer"), "input_ids")
    assert str(error.value).startswith(f"text.transformer: '{name}/model' cannot be loaded: ")
    assert "\n" not in str(error.value)
    hub_at("http://127.0.0.1:9", offline=True)
    fails(ConfigError, "not in the cache", load, NetworkSource("nobody/model", "text.transformer"), "input_ids")


class Numbered(nn.Module):
    """Stages under numbered names, as timm's ResNets have them, behind a stem with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(3))
        self.conv1 = nn.Conv2d(3, 4, 3)
        self.bn1 = nn.BatchNorm2d(4)
        for number in (1, 2, 3):
            block = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
            self.add_module(f"layer{number}", nn.Sequential(block, nn.Sequential(nn.Conv2d(4, 4, 3))))
        self.head = nn.Linear(4, 2)


def test_stages_under_numbered_names_are_layers():
    model = Numbered()
    found = layers(model)
    assert [id(block) for block in found.blocks] == [id(getattr(model, f"layer{n}")) for n in (1, 2, 3)]
    assert found.before == [model.conv1, model.bn1]
    freeze(model, 2, "freeze")
    learning = {name.partition(".")[0] for name, each in model.named_parameters() if each.requires_grad}
    assert learning == {"layer3", "head"}
    model.train()
    assert [each.training for each in (model.bn1, model.layer2[0][1], model.layer3)] == [False, False, True]
    # Unread parameters are frozen, and a chain without layers is refused.
    model = nn.ModuleDict({"read": nn.Linear(2, 2), "left": nn.Linear(2, 2)})
    assert fix_unused(model, model["read"](torch.ones(1, 2))) == ["left.weight", "left.bias"]
    assert (model["left"].weight.requires_grad, model["read"].weight.requires_grad) == (False, True)
    fails(ConfigError, r"Linear has 0\. Allowed: 'backbone'", freeze, nn.Linear(2, 2), 1, "text.freeze")
