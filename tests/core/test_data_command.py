"""`dipole data`: fetched from a server of this machine, checked, unpacked inside its folder, and prepared."""

import functools
import hashlib
import io
import itertools
import random
import sys
import tarfile
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from runs import dipole, done, refused

from dipole.core.train import data_sets as data_sets_module
from dipole.core.train.data_sets import DataSet, data_sets, find
from dipole.core.utils.download import RemoteFile, fetch, unpack
from dipole.core.utils.errors import ConfigError, DataError
from tests.runs import refused as fails

CONTENT = bytes(range(256)) * 4000
HALF = len(CONTENT) * 2 // 5
NO_FILE = "md5:" + "0" * 32
OLD = {"Last-Modified": "Thu, 01 Jan 2015 00:00:00 GMT"}
OTHER = bytes(reversed(CONTENT))
HEADERS = {  # a server's headers, whether it honours If-Range, whether a download can be resumed without a checksum
    "etag": ({"ETag": ""}, True, True),
    "etag-alone": ({"ETag": ""}, False, True),
    "date": (OLD, True, False),
    "weak": ({"ETag": "W/"}, True, False),
    "none": ({}, True, False),
}
MEMBERS = {f"a/{number}.bin": random.Random(number).randbytes(1280) for number in range(3)}


class Server(BaseHTTPRequestHandler):
    """Serves `files` with `headers`, knows ranges, and closes the connection after `stops` bytes of an answer.

    If-Range is honoured if `if_range` is set. An ETag of "content" is a hash of the file, unless `tag` is one. `shift`
    bytes before the asked ones are sent too. A range has at most `span` bytes.
    """

    def __init__(self, files, asked, settings, *arguments):
        self.files, self.asked, self.settings = files, asked, settings
        super().__init__(*arguments)

    def do_GET(self):
        name, begin = self.path.rpartition("/")[2], self.headers.get("Range")
        self.asked.append((name, begin))
        most = self.settings.get("answers") or len(self.asked)
        if name not in self.files or len(self.asked) > most:
            self.send_error(503 if name in self.files else 404)
            return
        data = self.files[name]
        headers = dict(self.settings.get("headers", {}))
        if "Last-Modified" in headers and data != CONTENT:
            headers["Last-Modified"] = "Thu, 01 Jan 2015 00:00:09 GMT"
        if "ETag" in headers:
            headers["ETag"] += f'"{self.settings.get("tag") or hashlib.md5(data).hexdigest()}"'
        known = (headers.get("ETag"), headers.get("Last-Modified"))
        if self.settings.get("if_range") and self.headers.get("If-Range", known[0]) not in known:
            begin = None
        start = int(begin.removeprefix("bytes=").rstrip("-")) - self.settings.get("shift", 0) if begin else 0
        if start >= len(data) and begin:
            self.send_response(416)
            headers["Content-Range"] = f"bytes */{len(data)}"
        else:
            self.send_response(206 if begin else self.settings.get("status", 200))
            end = min(len(data), start + self.settings.get("span", len(data))) if begin else len(data)
            if begin:
                headers["Content-Range"] = f"bytes {start}-{end - 1}/{self.settings.get('whole', len(data))}"
            data = data[:end]
            if not self.settings.get("unsized"):
                headers["Content-Length"] = str(end - start)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        stops = self.settings.get("stops")
        time.sleep(self.settings.get("pause", 0))
        self.wfile.write(data[start : start + stops] if stops else data[start:])

    def log_message(self, *arguments):
        pass


@pytest.fixture
def serve():
    running = []

    def start(files, settings=None):
        asked, settings = [], settings or {}
        server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Server, files, asked, settings))
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_port}", asked

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def md5(data):
    return f"md5:{hashlib.md5(data).hexdigest()}"


@pytest.mark.parametrize(("part", "stops", "asked_for"), [
    (None, None, [None]),
    (None, HALF, [None, f"bytes={HALF}-", f"bytes={2 * HALF}-"]),  # what was cut off is gone on with
    (CONTENT[:1000], None, ["bytes=1000-"]),  # as after a kill
    (CONTENT, None, [f"bytes={len(CONTENT)}-"]),  # killed before it got its name
])  # fmt: skip
def test_a_file_is_fetched_once_and_checked(serve, tmp_path, part, stops, asked_for):
    url, asked = serve({"x.bin": CONTENT}, {"stops": stops})
    if part is not None:
        (tmp_path / "x.bin.part").write_bytes(part)
    for _ in range(2):
        file = RemoteFile(f"{url}/x.bin", None if part else len(CONTENT), md5(CONTENT))
        assert fetch(file, tmp_path).read_bytes() == CONTENT
    assert asked == [("x.bin", each) for each in asked_for]
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]


CHANGED = [
    *itertools.product(HEADERS, [{}], [OTHER, OTHER[:-1], OTHER[:5000], OTHER[:1000], CONTENT + b"x"]),
    # The server ignores where to begin, or another file has the tag of the first.
    *itertools.product(["etag-alone"], [{"shift": 10}, {"shift": 5000}], [CONTENT]),
    *itertools.product(["etag-alone"], [{"tag": "a"}], [OTHER[:-1], OTHER[:1000]]),
]


@pytest.mark.parametrize(("kind", "settings", "other"), CHANGED)
def test_halves_of_two_files_are_not_joined(serve, tmp_path, kind, settings, other):
    file, files, _ = cut_off(serve, tmp_path, kind, **settings)
    files["x.bin"] = other
    assert fetch(file, tmp_path).read_bytes() == other
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]


# The note on a part afterwards, and whether the part is resumed. An earlier version wrote no length.
NOTES = [(lambda old: b"\n".join(old.split(b"\n")[:2]), True)]
NOTES += [(lambda old, new=new: new, False) for new in (b"\xff\xfe\x00", b"", b"\n\n\n\n")]


@pytest.mark.parametrize(
    ("kind", "change", "resumed"),
    [*((kind, bytes, each[2]) for kind, each in HEADERS.items()), *(("etag", *each) for each in NOTES)],
)
def test_without_a_checksum_only_a_known_file_is_resumed(serve, tmp_path, kind, change, resumed):
    file, _, asked = cut_off(serve, tmp_path, kind)
    for origin in tmp_path.glob("*.origin"):
        origin.write_bytes(change(origin.read_bytes()))
    assert fetch(file, tmp_path).read_bytes() == CONTENT
    assert asked == [("x.bin", "bytes=5000-" if resumed else None)]


def cut_off(serve, tmp_path, kind="etag-alone", **more):
    """Fetch 5,000 bytes of x.bin. Return the file, what the server has, and its requests."""
    headers, if_range, _ = HEADERS[kind]
    files, settings = {"x.bin": CONTENT}, {"headers": headers, "if_range": if_range, "stops": 5000, "answers": 1} | more
    url, asked = serve(files, settings)
    file = RemoteFile(f"{url}/x.bin")
    fails(DataError, "503", fetch, file, tmp_path)
    settings.update(stops=0, answers=0)
    asked.clear()
    return file, files, asked


@pytest.mark.parametrize("known", [None, len(CONTENT)])
@pytest.mark.parametrize("whole", [{}, {"whole": "*"}])
def test_short_answers_are_put_together(serve, tmp_path, known, whole):
    """A server may send less than the range that was asked for, and not say the size of the file again."""
    url, asked = serve({"x.bin": CONTENT}, {"headers": {"ETag": ""}, "span": len(CONTENT) // 4, "stops": HALF} | whole)
    assert fetch(RemoteFile(f"{url}/x.bin", known), tmp_path).read_bytes() == CONTENT
    assert len(asked) == 1 + 3


@pytest.mark.parametrize(
    ("packing", "refused_names"),
    [("gzip", ["x.bin"]), ("X-GZIP", ["x.bin"]), ("br", ["x.bin", "x.tgz"]), ("Identity", [])],
)
def test_packing_that_is_not_the_files_own_is_refused(serve, tmp_path, packing, refused_names):
    url, _ = serve({"x.bin": CONTENT, "x.tgz": CONTENT}, {"headers": {"Content-Encoding": packing}})
    for name in ("x.bin", "x.tgz"):
        if name in refused_names:
            fails(DataError, f"Content-Encoding {packing}", fetch, RemoteFile(f"{url}/{name}"), tmp_path)
            assert not (tmp_path / name).exists()
        else:
            assert fetch(RemoteFile(f"{url}/{name}"), tmp_path).read_bytes() == CONTENT


def test_other_answers_are_not_the_file(serve, tmp_path):
    odd = {"205": {"status": 205}, "1000": {"unsized": True}, "closed": {"headers": {"Transfer-Encoding": "chunked"}}}
    for said, settings in odd.items():
        url, _ = serve({"x.bin": CONTENT}, settings)
        fails(DataError, said, fetch, RemoteFile(f"{url}/x.bin", 1000), tmp_path)


def test_a_page_to_log_in_is_not_the_file(serve, tmp_path):
    page = b"<!DOCTYPE HTML><html>"
    pages = {"bin": b"\n" + page, "a": b"\xef\xbb\xbf" + page, "b": b"<?xml version='1.0'?>\n<!-- a -->" + page}
    pages |= {"tar": b'{"error": "\xc3\x9c"}', "gz": b"Busy\n", "parquet": b"<?xml?><Error>"}
    url, _ = serve({f"x.{end}": content for end, content in pages.items()}, {})
    for end, content in pages.items():
        said = ("has text in place of its content: ", "has a web page ")[page in content]
        fails(DataError, rf"{said}.* moved to .*x\.{end}\.wrong", fetch, RemoteFile(f"{url}/x.{end}"), tmp_path)
    url, _ = serve({"x.bin": CONTENT, "x.HTML": CONTENT}, {"headers": {"Content-Type": "text/html; charset=utf-8"}})
    fails(DataError, "sends a web page, not the file", fetch, RemoteFile(f"{url}/x.bin"), tmp_path)
    assert not (tmp_path / "x.bin").exists()
    published = {"checksum": f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"}
    for name, known in (("x.HTML", {}), ("x.bin", published)):
        assert fetch(RemoteFile(f"{url}/{name}", **known), tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(("files", "published", "said"), [
    ({"x.bin": b""}, (), "the file has 0 bytes"), ({}, (), "404"),
    ({"x.bin": CONTENT}, (None, NO_FILE), "published one is 0.*x.bin.wrong"),
    ({"x.bin": CONTENT}, (len(CONTENT) + 1, NO_FILE), "published file has"),
])  # fmt: skip
def test_another_file_than_the_published_one_is_not_taken(serve, tmp_path, files, published, said):
    url, asked = serve(files)
    fails(DataError, f"(?s){said}", fetch, RemoteFile(f"{url}/x.bin", *published), tmp_path)
    assert len(asked) == 1  # and is not asked for again
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin.wrong"] * bool(files)


@pytest.mark.parametrize("name", ["x.bin", "x.bin.lock", "x.bin.part", "x.bin.part.origin"])
def test_a_folder_in_the_place_of_a_file_is_named(serve, tmp_path, name):
    (tmp_path / name).mkdir()
    url, _ = serve({"x.bin": CONTENT})
    fails(DataError, f"cannot write .*/{name}: Is a directory", fetch, RemoteFile(f"{url}/x.bin"), tmp_path)


def test_another_mirror_is_another_file(serve, tmp_path, monkeypatch):
    file, _, _ = cut_off(serve, tmp_path, "date")
    mirror, _ = serve({"x.bin": OTHER}, {"headers": OLD, "if_range": True})
    monkeypatch.setenv("DIPOLE_DATA_URL", mirror)
    assert fetch(file, tmp_path).read_bytes() == OTHER
    monkeypatch.setenv("DIPOLE_DATA_URL", tmp_path.as_uri())
    assert fetch(file, tmp_path / "copy").read_bytes() == OTHER


@pytest.mark.parametrize("known", [False, True])
def test_processes_that_fetch_one_file_take_turns(serve, tmp_path, known):
    url, asked = serve({"x.bin": CONTENT}, {"pause": 0.3})
    file, waited = RemoteFile(f"{url}/x.bin", None, md5(CONTENT) if known else None), []
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(fetch, file, tmp_path, waits=lambda: waited.append(1)) for _ in range(4)]
    assert all(each.result().read_bytes() == CONTENT for each in found)
    assert (len(asked), len(waited)) == (1, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]


def test_without_a_network_the_place_to_put_it_is_named(tmp_path):
    with pytest.raises(DataError, match=r"cannot fetch http://127\.0\.0\.1:9/x\.txt .*put it at .*x\.txt"):
        fetch(RemoteFile("http://127.0.0.1:9/x.txt"), tmp_path / "a")
    (tmp_path / "a" / "x.txt").write_bytes(b"by hand")
    assert fetch(RemoteFile("http://127.0.0.1:9/x.txt"), tmp_path / "a").read_bytes() == b"by hand"


def tar(path, members, kind="gz"):
    with tarfile.open(path, f"w:{kind}") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname, content = tarfile.SYMTYPE, content, b""
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def zipped(path, members, method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "a/../../out", "C:/out"])
def test_nothing_leaves_the_folder(tmp_path, name):
    inner = tmp_path / "deep" / "inner"
    inner.mkdir(parents=True)
    content = {name: b"x"}
    for path in (tar(tmp_path / "x.tar.gz", content), zipped(tmp_path / "x.zip", content)):
        fails(DataError, "points outside the target folder", unpack, path, inner)
    assert not list(tmp_path.rglob("out"))
    fails(DataError, "is a link", unpack, tar(tmp_path / "l.tar.gz", {"a": "/etc/passwd"}), tmp_path)
    for content in ({"a": b"x", "a/b": b"x"}, {"b/c": b"x", "b": b"x"}, {"x" * 300: b"x"}, {".": b"x"}):
        path = tar(tmp_path / "n.tar", content)
        fails(DataError, "is damaged, or neither tar.*fetch it again", unpack, path, tmp_path)


def packed(path, kind):
    if not kind.startswith("zip"):
        return tar(path, MEMBERS, kind)
    method = {"zip": zipfile.ZIP_DEFLATED, "zip-lzma": zipfile.ZIP_LZMA, "zip-bz2": zipfile.ZIP_BZIP2}[kind]
    return zipped(path, MEMBERS, method)


def check_damaged(path, contents):
    for content in contents:
        path.write_bytes(content)
        fails(DataError, "is damaged, or neither tar", unpack, path, path.parent / "out")


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zip", "zip-lzma", "zip-bz2"])
def test_archives_are_checked_to_the_last_byte(tmp_path, kind):
    path = packed(tmp_path / "archive", kind)
    whole, half = path.read_bytes(), path.stat().st_size // 2
    unpack(path, tmp_path / "out")
    assert all((tmp_path / "out" / name).read_bytes() == content for name, content in MEMBERS.items())
    if kind.startswith("zip"):
        offset = whole[:-3] + bytes([whole[-3] ^ 255]) + whole[-2:]  # of the list of files
        changed = [whole.replace(whole[60:64], bytes(4), 1), whole[:-4] + b"\xff" + whole[-3:], offset]
    else:
        flipped = (whole[:-n] + bytes([whole[-n] ^ 128]) + whole[len(whole) - n + 1 :] for n in range(1, 9))
        changed = [*flipped, whole[:-1], whole[:-9]]
    changed += [bytes(len(whole)), whole[:half], whole[:half] + b"\xff" * 9 + whole[half + 9 :]]
    check_damaged(path, changed)
    if kind == "xz":  # whose padding is zeros
        for zeros in (4, 1024):
            path.write_bytes(whole + bytes(zeros))
            unpack(path, tmp_path / f"{zeros}")
    if kind == "zip":  # in a tar
        unpack(tar(tmp_path / "z.tar", {"a/0.bin": b"", "z.zip": whole}, ""), tmp_path / "z")
        assert [file.stat().st_size for file in sorted((tmp_path / "z").rglob("*.*"))] == [0, len(whole)]
    # A damaged header is not the end of a tar.
    whole = packed(tmp_path / "x.tar", "").read_bytes()
    second = 512 + 1536  # after the first header and 1,280 bytes of content
    assert whole[second : second + 7] == b"a/1.bin"
    changed = (whole[:second], whole[: second + 100], whole[: second + 9] + b"?" + whole[second + 10 :])
    check_damaged(tmp_path / "x.tar", changed)


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
    assert "put it at data/toy.download/toy.tar.gz" in refused(capsys, "data", "get", "toy", "--yes", code=1)
    url, asked = serve({"toy.tar.gz": toy})
    monkeypatch.setenv("DIPOLE_DATA_URL", url)
    err = refused(capsys, "data", "get", "toy")
    for said in ("licence  free for all", f"size     {len(toy)} B in 1 file", "--yes"):
        assert said in err
    assert not asked
    assert "--set toy=data/toy" in done(capsys, "data", "get", "toy", "--yes")
    assert Path("data/toy/a/x.txt").read_bytes() == b"hello"
    done(capsys, "data", "get", "toy")
    Path("put.download").mkdir()
    Path("put.download/toy.tar.gz").write_bytes(toy)
    done(capsys, "data", "get", "toy", "--to", "put")  # nothing is fetched, so there is no question
    assert (Path("put/a/x.txt").is_file(), len(asked)) == (True, 1)


def test_a_folder_appears_whole_or_not_at_all(toy, serve, tmp_path, capsys):
    broken = tar(tmp_path / "b.tar.gz", {"broken": b""}).read_bytes()
    file = RemoteFile("http://x/toy.tar.gz")
    sys.modules["toy_data"].SETS["toy"] = DataSet("", "", "", (file,), "toy_data:prepare", "")
    url, _ = serve({"toy.tar.gz": broken})
    code, out, _ = dipole(capsys, "data", "get", "toy", "--yes", "--url", url, "--to", "there")
    assert (code, "no checksum is known of toy.tar.gz" in out) == (1, True)
    assert [path.name for path in Path().iterdir() if path.is_dir()] == ["there.download"]
    Path("mine/thesis").mkdir(parents=True)
    assert "Give another folder" in refused(capsys, "data", "get", "toy", "--yes", "--to", "mine", code=1)
    for unnamed in (".", "..", "/", "there/.."):
        assert "with a name" in refused(capsys, "data", "get", "toy", "--yes", "--out", unnamed, code=1)


def test_every_domain_declares_its_own(capsys):
    assert {"bookcorpus", "cifar10", "cifar100", "senteval", "stl10", "wiki3029"} <= data_sets().keys()
    out = done(capsys, "data", "list")
    assert all(name in out for name in data_sets())
    assert out.count("licence:") >= 5
    fails(ConfigError, "Did you mean 'cifar10'", find, "cifar1")
    for name in ("cifar10", "cifar100", "stl10"):
        assert all(file.size and file.checksum.startswith("md5:") for file in find(name).files)
