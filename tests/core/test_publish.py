"""Model cards, what a push asks of the Hub, what the Hub refuses, and frozen layers; a server here is the Hub."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dipole.core.train.card import Card, check_push, push, set_licence, write_card
from dipole.core.utils.backbone import Source, load
from dipole.core.utils.errors import ConfigError, TrainingError
from dipole.core.utils.freezing import fix_unused, freeze, layers

RECORD = SimpleNamespace(
    name="a: name", objective="infonce(temperature=0.2)", seed=0, epochs=2.0, hash="0" * 12, versions={},
    results={"linear/accuracy": 0.25, "lost": None},
)  # fmt: skip
CARD = Card("An encoder.", "import torch", "feature-extraction", "transformers", ("text",), "A note.")


def test_a_card_says_licence_data_objective_and_results(tmp_path):
    from huggingface_hub import ModelCard

    write_card(tmp_path, CARD, RECORD, {"name": "hub:owner/set", "fingerprint": "f" * 8, "sizes": {"train": 9}})
    set_licence(tmp_path, "cc-by-4.0")
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.license, card.data.library_name) == ("cc-by-4.0", "transformers")
    assert (card.data.datasets, card.data.model_name) == (["owner/set"], "a: name")
    assert [(each.metric_name, each.metric_value) for each in card.data.eval_results] == [("linear/accuracy", 0.25)]
    for said in ("An encoder.", "1 x `infonce`", "| linear/accuracy | 0.2500 |", "train 9", "A note.", "f" * 8):
        assert said in card.text


def test_a_card_without_results_or_objective_is_read_as_well(tmp_path):
    from huggingface_hub import ModelCard

    for objective in ("none", "gone(x=1)"):
        record = SimpleNamespace(**(vars(RECORD) | {"objective": objective, "results": {}}))
        write_card(tmp_path, CARD, record, {"name": "/a/folder"})
        assert ModelCard.load(tmp_path / "README.md").data.eval_results is None


def test_a_push_that_cannot_begin_is_refused_before_the_work(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    with pytest.raises(ConfigError, match="nobody is logged in"):
        check_push("me/model")
    with pytest.raises(ConfigError, match="NAME or OWNER/NAME"):
        check_push("a/b/c")
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    check_push("me/model")


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as an upload of small files asks for."""

    asked: list[tuple[str, str, bytes]]
    refuse: bool

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
        self.reply({"id": "me/model", "sha": "1", **about})

    do_HEAD = do_GET  # noqa: N815

    def reply(self, value: object, code: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def pushed(tmp_path, monkeypatch):
    """Push a folder of two files to a server in place of the Hub."""
    from huggingface_hub import constants

    for name in ("README.md", "config.json"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def call(endpoint):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        return push(tmp_path, "me/model", private=True)

    return call


@contextmanager
def serving(handler):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("refuse", [False, True])
def test_a_push_makes_the_repository_and_sends_the_files(pushed, refuse):
    hub = type("OneHub", (Hub,), {"asked": [], "refuse": refuse})
    with serving(hub) as address:
        if refuse:
            with pytest.raises(TrainingError, match=r"could not be pushed to me/model.*hf upload me/model"):
                pushed(address)
        else:
            pushed(address)
    made = next(json.loads(body) for _, path, body in hub.asked if path.startswith("/api/repos/create"))
    assert (made["name"], made["organization"]) == ("model", "me")
    assert "private" in (made.get("visibility"), made.get("private") and "private")  # newer clients, older ones
    if not refuse:
        commit = next(body for method, path, body in hub.asked if "/commit/" in path)
        assert b"config.json" in commit
        assert b"README.md" in commit


def test_without_a_network_there_is_one_message(pushed):
    with pytest.raises(TrainingError, match="could not be pushed to me/model"):
        pushed("http://127.0.0.1:9")


ANSWERS = {
    "gated": (403, "GatedRepo", "it is gated: accept its terms"),
    "missing": (401, "RepoNotFound", "no model of that name, or it is private"),
    "revision": (404, "RevisionNotFound", "no such revision"),
}


class RefusingHub(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        parts = set(self.path.split("/"))
        code, kind, _ = next(answer for name, answer in ANSWERS.items() if name in parts)
        self.send_response(code)
        self.send_header("X-Error-Code", kind)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD  # noqa: N815

    def log_message(self, *arguments: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def hub_at(monkeypatch, tmp_path):
    """Let the Hub be at an address, with an empty cache."""
    from huggingface_hub import constants

    def use(address, offline=False):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)

    return use


@pytest.mark.parametrize("name", ANSWERS)
def test_what_the_hub_refuses(hub_at, name):
    with serving(RefusingHub) as address:
        hub_at(address)
        with pytest.raises(ConfigError, match=ANSWERS[name][2]) as error:
            load(Source(f"{name}/model", "text.transformer"), "input_ids")
    assert str(error.value).startswith(f"text.transformer: '{name}/model' cannot be loaded: ")
    assert "\n" not in str(error.value)


def test_no_network(hub_at):
    hub_at("http://127.0.0.1:9", offline=True)
    with pytest.raises(ConfigError, match="not in the cache"):
        load(Source("nobody/model", "text.transformer"), "input_ids")


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
    assert not model.bn1.training
    assert not model.layer2[0][1].training
    assert model.layer3.training


def test_unread_parameters_are_frozen_and_a_chain_without_layers_is_refused():
    model = nn.ModuleDict({"read": nn.Linear(2, 2), "left": nn.Linear(2, 2)})
    assert fix_unused(model, model["read"](torch.ones(1, 2))) == ["left.weight", "left.bias"]
    assert not model["left"].weight.requires_grad
    assert model["read"].weight.requires_grad
    with pytest.raises(ConfigError, match=r"Linear has 0\. Allowed: 'backbone'"):
        freeze(nn.Linear(2, 2), 1, "text.freeze")
