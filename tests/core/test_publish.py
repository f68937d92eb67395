"""Model cards, and what a push asks of the Hub: a server on this machine that keeps what it was asked."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from dipole.core.train.card import Card, check_push, set_licence, write_card
from dipole.core.utils.errors import ConfigError

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
    assert card.data.license == "cc-by-4.0"
    assert (card.data.library_name, card.data.datasets, card.data.model_name) == (
        "transformers",
        ["owner/set"],
        "a: name",
    )
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
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.asked.append(("POST", self.path, body))
        if self.refuse:
            self.reply({"error": "no"}, 403)
        elif self.path.startswith("/api/repos/create"):
            self.reply({"url": f"http://{self.headers['Host']}/me/model", "id": "me/model", "name": "me/model"})
        elif "/preupload/" in self.path:
            files = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for each in json.loads(body)["files"]
            ]
            self.reply({"files": files})
        else:
            self.reply(
                {"commitUrl": f"http://{self.headers['Host']}/me/model/commit/1", "commitOid": "1", "success": True}
            )

    def do_GET(self) -> None:
        self.asked.append(("GET", self.path, b""))
        self.reply(
            {"id": "me/model", "sha": "1", "siblings": [], "private": True, "tags": [], "downloads": 0, "likes": 0}
        )

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


SCRIPT = """
import sys
from pathlib import Path
from dipole.core.utils.errors import DipoleError
from dipole.core.train.card import push
try:
    print(push(Path(sys.argv[1]), "me/model", private=True))
except DipoleError as error:
    sys.exit(f"error: {error}")
"""


def pushed(folder: Path, endpoint: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {
        "HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_x", "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1",
        "no_proxy": "*", "NO_PROXY": "*",
    }  # fmt: skip
    environment.pop("HF_HUB_OFFLINE", None)
    out = folder / "out"
    out.mkdir()
    (out / "README.md").write_text("---\nlicense: mit\n---\n")
    (out / "config.json").write_text("{}")
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(out)], env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("refuse", [False, True])
def test_a_push_makes_the_repository_and_sends_the_files(tmp_path, refuse):
    hub = type("OneHub", (Hub,), {"asked": [], "refuse": refuse})
    server = ThreadingHTTPServer(("127.0.0.1", 0), hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        found = pushed(tmp_path, f"http://127.0.0.1:{server.server_address[1]}")
    finally:
        server.shutdown()
        server.server_close()
    made = next(json.loads(body) for _, path, body in hub.asked if path.startswith("/api/repos/create"))
    assert (made["name"], made["organization"]) == ("model", "me")
    assert "private" in (made.get("visibility"), made.get("private") and "private")  # newer clients, older ones
    if refuse:
        assert found.returncode == 1
        assert "could not be pushed to me/model" in found.stderr
        assert "hf upload me/model" in found.stderr
        assert "Traceback" not in found.stderr
        return
    assert found.returncode == 0, found.stderr
    commit = next(body for method, path, body in hub.asked if "/commit/" in path)
    assert b"config.json" in commit
    assert b"README.md" in commit


def test_without_a_network_there_is_one_message(tmp_path):
    found = pushed(tmp_path, "http://127.0.0.1:9")
    assert found.returncode == 1
    assert found.stderr.count("error: ") == 1
    assert "could not be pushed to me/model" in found.stderr
