"""Networks that cannot be had say why in one message: a real server answers as the Hub does."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from torch import nn

from dipole.core.utils.backbone import Source, load
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.freezing import fix_unused, freeze, layers

ANSWERS = {
    "gated": (403, "GatedRepo", "it is gated: accept its terms"),
    "missing": (401, "RepoNotFound", "no model of that name, or it is private"),
    "revision": (404, "RevisionNotFound", "no such revision"),
}


class Hub(BaseHTTPRequestHandler):
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
def hub(monkeypatch, tmp_path):
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    yield
    server.shutdown()


@pytest.mark.parametrize("name", ANSWERS)
def test_what_the_hub_refuses(hub, name):
    with pytest.raises(ConfigError, match=ANSWERS[name][2]) as error:
        load(Source(f"{name}/model", "text.transformer"), "input_ids")
    assert str(error.value).startswith(f"text.transformer: '{name}/model' cannot be loaded: ")
    assert "\n" not in str(error.value)


def test_no_network(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="not in the cache"):
        load(Source("nobody/model", "text.transformer"), "input_ids")


# What is frozen ------------------------------------------------------------------------------------------------------


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
