"""What `dipole data get` makes of SentEval's archive and of the Hub's parquet files."""

import io
import json
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dipole.core.utils.download import fetch
from dipole.core.utils.errors import DataError
from dipole.text import prepare
from dipole.text.corpus import read_documents


@pytest.mark.parametrize("top", ["", "downstream/", "senteval/data/downstream/"])
def test_senteval(tmp_path, top):
    with tarfile.open(tmp_path / "senteval.tar", "w") as archive:
        for name in ("MR/rt-polarity.pos", "MR/rt-polarity.neg", "STS/STS12-en-test/STS.input.MSRpar.txt"):
            info = tarfile.TarInfo(top + name)
            info.size = 2
            archive.addfile(info, io.BytesIO(b"a\n"))
    (tmp_path / "to").mkdir()
    prepare.senteval(tmp_path, tmp_path / "to")
    assert (tmp_path / "to/downstream/MR/rt-polarity.neg").is_file()
    assert (tmp_path / "to/downstream/STS/STS12-en-test").is_dir()
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["downstream"]


def test_bookcorpus_from_a_hub_of_this_machine(tmp_path, monkeypatch):
    import hashlib

    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["one two three .", "four five six ."]}), tmp_path / "0000.parquet")
    data = (tmp_path / "0000.parquet").read_bytes()
    sha = hashlib.sha256(data).hexdigest()
    listed = {
        "id": "bookcorpus/bookcorpus", "sha": "0" * 40,
        "siblings": [
            {"rfilename": "plain_text/train/0000.parquet", "size": len(data), "blobId": "x",
             "lfs": {"size": len(data), "sha256": sha, "pointerSize": 1}},
            {"rfilename": "README.md", "size": 1, "blobId": "y"},
        ],
    }  # fmt: skip

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps(listed).encode() if "/api/" in self.path else data
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.hf_api.constants.HF_HUB_OFFLINE", False)
        (file,) = prepare.bookcorpus_files()
        assert (file.size, file.checksum) == (len(data), f"sha256:{sha}")
        assert file.path == "plain_text/train/0000.parquet"
        fetched = fetch(type(file)(f"{address}/x", file.size, file.checksum, file.path), tmp_path / "down")
        assert fetched.read_bytes() == data
    finally:
        server.shutdown()
        server.server_close()
    (tmp_path / "to").mkdir()
    prepare.bookcorpus(tmp_path / "down", tmp_path / "to")
    (made,) = (tmp_path / "to").iterdir()
    sentences = [sentence for document in read_documents(str(made)) for sentence in document.sentences]
    assert sentences == ["one two three .", "four five six ."]


def test_without_the_hub_the_folder_by_hand_is_named(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"give their folder as text\.corpus"):
        prepare.bookcorpus_files()
