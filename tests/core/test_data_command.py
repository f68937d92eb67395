"""`dipole data`: fetched from a server of this machine, checked, unpacked inside its folder, and prepared."""

import functools
import hashlib
import io
import sys
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from dipole.core.cli.app import main
from dipole.core.train import data_sets as data_sets_module
from dipole.core.train.data_sets import DataSet, data_sets, find
from dipole.core.utils.download import RemoteFile, fetch
from dipole.core.utils.errors import ConfigError, DataError
from dipole.core.utils.unpack import unpack

CONTENT = bytes(range(256)) * 4000


class Server(BaseHTTPRequestHandler):
    """Serves `files`; knows ranges, and closes the connection after `stops` bytes of an answer."""

    def __init__(self, files, asked, stops, *arguments):
        self.files, self.asked, self.stops = files, asked, stops
        super().__init__(*arguments)

    def do_GET(self):
        name, begin = self.path.rpartition("/")[2], self.headers.get("Range")
        self.asked.append((name, begin))
        if name not in self.files:
            self.send_error(404)
            return
        data = self.files[name]
        start = int(begin.removeprefix("bytes=").rstrip("-")) if begin else 0
        if start >= len(data) and begin:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(data)}")
            self.end_headers()
            return
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        self.wfile.write(data[start : start + self.stops] if self.stops else data[start:])

    def log_message(self, *arguments):
        pass


@pytest.fixture
def serve():
    running = []

    def start(files, stops=0):
        asked = []
        server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Server, files, asked, stops))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_port}", asked

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def md5(data):
    return f"md5:{hashlib.md5(data).hexdigest()}"


def test_a_file_is_fetched_once_and_checked(serve, tmp_path):
    url, asked = serve({"x.bin": CONTENT})
    file = RemoteFile(f"{url}/x.bin", len(CONTENT), md5(CONTENT))
    for _ in range(2):
        assert fetch(file, tmp_path).read_bytes() == CONTENT
    assert asked == [("x.bin", None)]
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]


def test_what_was_cut_off_is_gone_on_with(serve, tmp_path):
    half = len(CONTENT) * 2 // 5
    url, asked = serve({"x.bin": CONTENT}, stops=half)
    file = RemoteFile(f"{url}/x.bin", len(CONTENT), md5(CONTENT))
    assert fetch(file, tmp_path).read_bytes() == CONTENT
    assert asked == [("x.bin", None), ("x.bin", f"bytes={half}-"), ("x.bin", f"bytes={2 * half}-")]


def test_a_killed_fetch_goes_on(serve, tmp_path):
    url, asked = serve({"x.bin": CONTENT})
    (tmp_path / "x.bin.part").write_bytes(CONTENT[:1000])
    assert fetch(RemoteFile(f"{url}/x.bin"), tmp_path).read_bytes() == CONTENT
    assert asked == [("x.bin", "bytes=1000-")]
    (tmp_path / "x.bin").rename(tmp_path / "x.bin.part")  # killed before it got its name
    assert fetch(RemoteFile(f"{url}/x.bin"), tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(("size", "said"), [(None, "published one is 0"), (len(CONTENT) + 1, "published file has")])
def test_another_file_than_the_published_one_is_set_aside(serve, tmp_path, size, said):
    url, _ = serve({"x.bin": CONTENT})
    with pytest.raises(DataError, match=said) as caught:
        fetch(RemoteFile(f"{url}/x.bin", size, "md5:" + "0" * 32), tmp_path)
    if size is None:
        assert "x.bin.wrong" in str(caught.value)
        assert [path.name for path in tmp_path.iterdir()] == ["x.bin.wrong"]


def test_without_a_network_the_place_to_put_it_is_named(tmp_path):
    with pytest.raises(DataError, match=r"cannot fetch http://127\.0\.0\.1:9/x\.tar .*put it at .*x\.tar"):
        fetch(RemoteFile("http://127.0.0.1:9/x.tar"), tmp_path / "a")
    (tmp_path / "a" / "x.tar").write_bytes(b"by hand")
    assert fetch(RemoteFile("http://127.0.0.1:9/x.tar"), tmp_path / "a").read_bytes() == b"by hand"


def test_a_missing_file_is_not_asked_for_again(serve, tmp_path):
    url, asked = serve({})
    with pytest.raises(DataError, match="404"):
        fetch(RemoteFile(f"{url}/x.bin"), tmp_path)
    assert len(asked) == 1


# --- archives ---------------------------------------------------------------------------------------------------------


def tar(path, members):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "a/../../out", "C:/out"])
def test_nothing_leaves_the_folder(tmp_path, name):
    inner = tmp_path / "deep" / "inner"
    inner.mkdir(parents=True)
    with pytest.raises(DataError, match="points outside the target folder"):
        unpack(tar(tmp_path / "x.tar.gz", {name: b"x"}), inner)
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(name, b"x")
    with pytest.raises(DataError, match="points outside the target folder"):
        unpack(tmp_path / "x.zip", inner)
    assert not list(tmp_path.rglob("out"))


def test_links_are_refused_and_files_unpacked(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    with pytest.raises(DataError, match="is a link"):
        unpack(tar(tmp_path / "l.tar.gz", {"a": "/etc/passwd"}), inner)
    unpack(tar(tmp_path / "x.tar.gz", {"a/b.txt": b"1"}), inner)
    assert (inner / "a" / "b.txt").read_bytes() == b"1"
    whole = (tmp_path / "x.tar.gz").read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="is damaged or not an archive"):
        unpack(tmp_path / "cut.tar.gz", inner)


# --- the command ------------------------------------------------------------------------------------------------------


def prepare(downloads, folder):
    unpack(downloads / "toy.tar.gz", folder)
    if (folder / "broken").exists():
        raise DataError("it is broken.")


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """A domain with a data set of one archive."""
    archive = tar(tmp_path / "toy.tar.gz", {"a/x.txt": b"hello"}).read_bytes()
    module = type(sys)("toy_data")
    module.prepare = prepare
    file = RemoteFile("http://127.0.0.1:9/toy.tar.gz", len(archive), md5(archive))
    module.SETS = {"toy": DataSet("a toy", "free for all", "http://page", (file,), "toy_data:prepare", "toy={folder}")}
    monkeypatch.setitem(sys.modules, "toy_data", module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DIPOLE_DATA_URL", raising=False)
    found = [EntryPoint("playing", "toy_data:SETS", "dipole.data"), *data_sets_module.points("data")]
    monkeypatch.setattr(data_sets_module, "points", lambda kind: found)
    return archive


def test_get_says_what_it_is_asks_and_prepares(toy, serve, capsys, monkeypatch):
    url, asked = serve({"toy.tar.gz": toy})
    monkeypatch.setenv("DIPOLE_DATA_URL", url)
    assert main(["data", "get", "toy"]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert "licence  free for all" in out.err
    assert f"size     {len(toy)} B in 1 file" in out.err
    assert "--yes" in out.err
    assert not asked
    assert main(["data", "get", "toy", "--yes"]) == 0
    assert "--set toy=data/toy" in capsys.readouterr().out
    assert Path("data/toy/a/x.txt").read_bytes() == b"hello"
    assert main(["data", "get", "toy"]) == 0
    assert len(asked) == 1


def test_get_takes_what_was_put_there_by_hand(toy, capsys):
    assert main(["data", "get", "toy", "--yes"]) == 1
    assert "put it at data/toy.download/toy.tar.gz" in capsys.readouterr().err
    Path("data/toy.download/toy.tar.gz").write_bytes(toy)
    assert main(["data", "get", "toy"]) == 0  # nothing is fetched, so nobody is asked
    assert Path("data/toy/a/x.txt").is_file()


def test_a_folder_appears_whole_or_not_at_all(toy, serve, tmp_path, capsys):
    broken = tar(tmp_path / "b.tar.gz", {"broken": b""}).read_bytes()
    sys.modules["toy_data"].SETS["toy"] = DataSet(
        "", "", "", (RemoteFile("http://x/toy.tar.gz"),), "toy_data:prepare", ""
    )
    url, _ = serve({"toy.tar.gz": broken})
    assert main(["data", "get", "toy", "--yes", "--url", url, "--to", "there"]) == 1
    assert "no checksum is known of toy.tar.gz" in capsys.readouterr().out
    assert sorted(path.name for path in Path().iterdir() if path.is_dir()) == ["there.download"]
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("x")
    assert main(["data", "get", "toy", "--yes", "--to", "mine"]) == 1
    assert "Give another folder" in capsys.readouterr().err


def test_every_domain_declares_its_own(capsys):
    assert {"bookcorpus", "cifar10", "cifar100", "senteval", "stl10", "wiki3029"} <= data_sets().keys()
    assert main(["data", "list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in data_sets())
    assert out.count("licence:") >= 5
    with pytest.raises(ConfigError, match="Did you mean 'cifar10'"):
        find("cifar1")
    for name in ("cifar10", "cifar100", "stl10"):
        assert all(file.size and file.checksum.startswith("md5:") for file in find(name).files)
