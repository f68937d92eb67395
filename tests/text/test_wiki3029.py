"""Wiki-3029 out of dumps, folders and lines. The sets that are fetched come whole or not at all."""

import bz2
import gzip
import hashlib
import io
import json
import tarfile
import threading
import warnings
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pandas
import pytest

from dipole.core.cli import main
from dipole.core.utils.download import fetch
from dipole.core.utils.errors import DataError
from dipole.text import prepare
from dipole.text.corpus import documents_of, read_pieces
from dipole.text.wiki3029 import build, is_dump, prose
from tests.runs import refused


def sentence(article, number):
    return f"Article {article} says that number {number} follows the one before it."


def dump(path, lengths, cut=None):
    """A dump as MediaWiki writes it, with a redirect, a talk page and an article of each length."""
    page = (
        "<page><title>{}</title><ns>{}</ns><id>1</id>{}<revision><id>2</id><contributor><username>x</username>"
        '</contributor><text bytes="9" xml:space="preserve">{}</text></revision></page>'
    )
    parts = [
        '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" xml:lang="en"><siteinfo><namespaces>'
        '<namespace key="6" case="first-letter">Datei</namespace></namespaces></siteinfo>',
        page.format("Redirect", 0, '<redirect title="A0" />', "#REDIRECT [[A0]]"),
        page.format("Talk:A0", 1, "", " ".join(sentence("talk", i) for i in range(99))),
    ]
    for article, length in enumerate(lengths):
        body = "{{Infobox|a={{b}}}}\n'''A''' [[Datei:x.jpg|thumb|a [[link]] in it]] "
        lines = "\n".join(sentence(article, i) for i in range(length))
        text = body + lines + "\n== Notes ==\n* a list of things and of others"
        parts.append(page.format(f"A{article}", 0, "", text))
    data = ("\n".join(parts) + "\n</mediawiki>\n").encode()
    data = bz2.compress(data[:cut]) if path.suffix == ".bz2" else data[:cut]
    path.write_bytes(data)
    return path


def rows(path):
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("name", ["wiki.xml", "wiki-pages-articles1.xml-p1p99.bz2"])
def test_a_dump(tmp_path, name, capsys):
    source = dump(tmp_path / name, [30, 9, 12, 30, 25])
    assert is_dump(source)
    out = tmp_path / "out" / "wiki.jsonl.gz"
    assert main(["data", "wiki3029", str(source), str(out), "--articles", "3", "--sentences", "12"]) == 0
    assert "3 articles of 12 sentences, drawn from 4 that are long enough, of 5" in capsys.readouterr().out
    found = rows(out)
    assert len(found) == 3
    for row in found:
        article = row["id"].removeprefix("A")
        assert article in "0234"
        assert len(set(row["sentences"])) == len(row["sentences"]) == 12
        assert all(s.removeprefix("A ").startswith(f"Article {article} says") for s in row["sentences"])
    # The files that the recipe reads.
    assert [len(d.sentences) for d in documents_of(read_pieces(str(out)))] == [12, 12, 12]


def test_the_seed_and_the_articles_alone_decide(tmp_path):
    source = dump(tmp_path / "wiki.xml", [20] * 12)
    first, second, other = (tmp_path / f"{n}.jsonl.gz" for n in "abc")
    for out, seed in ((first, 0), (second, 0), (other, 1)):
        build(source, out, articles=5, sentences=10, seed=seed)
    assert first.read_bytes() == second.read_bytes()
    assert {r["id"] for r in rows(first)} != {r["id"] for r in rows(other)}
    # Every article is as likely as another, whatever its place.
    taken = np.zeros(12)
    for seed in range(60):
        build(source, other, articles=3, sentences=5, seed=seed)
        for row in rows(other):
            taken[int(row["id"][1:])] += 1
    assert ((taken - 15) ** 2 / 15).sum() < 11 + 5 * 22**0.5


def test_a_folder_in_any_order_and_lines(tmp_path):
    folder = tmp_path / "articles"
    (folder / "deeper").mkdir(parents=True)
    (folder / "one.txt").write_text(" ".join(sentence(1, i) for i in range(20)))
    (folder / "deeper" / "two").write_text("\n".join(sentence(2, i) for i in range(20)))
    (folder / "empty.txt").write_text("")
    (folder / ".hidden").write_text("x")
    articles = [{"id": n, "text": " ".join(sentence(n, i) for i in range(20))} for n in (3, 4)]
    (folder / "more.jsonl").write_text("\n".join(map(json.dumps, articles)))
    out = tmp_path / "a.jsonl"
    for unit in ("documents", "sentences"):
        if unit == "sentences":
            (folder / "one.txt").unlink()
        build(folder, out, articles=3, sentences=15, unit=unit)
        assert len(rows(out)) == 3
        assert {r["id"] for r in rows(out)} <= {"one.txt", "deeper/two", "more.jsonl: 3", "more.jsonl: 4"}
    lines = (f'{n},"{" ".join(sentence(n, i) for i in range(4))}"\n' for n in range(3))
    (tmp_path / "articles.csv").write_text("n,text\n" + "".join(lines))
    with warnings.catch_warnings(action="error"):
        assert build(tmp_path / "articles.csv", out, articles=3, sentences=4)[1] >= 3


def test_what_cannot_be_done_is_said_and_nothing_is_written(tmp_path, capsys):
    source, out = dump(tmp_path / "wiki.xml", [30, 9]), tmp_path / "out.jsonl"
    packed = dump(tmp_path / "whole.xml.bz2", [300])
    packed.write_bytes(packed.read_bytes()[:-30])
    (tmp_path / "other.xml").write_text("<html><body/></html>")
    (tmp_path / "a.txt").write_text("A sentence of five words.")
    (tmp_path / "folder.jsonl").mkdir()
    cut = [dump(tmp_path / name, [30, 30], cut=-400) for name in ("cut.xml", "cut.xml.bz2")]
    for given, to, options, message in (
        (source, out, {"sentences": 20}, r"1 of 2 articles have 20 different .* and 3029 are wanted.*--articles"),
        (tmp_path / "none", out, {}, "nothing is at"),
        (source, tmp_path / "out.txt", {}, r"must be named NAME\.jsonl"),
        *((each, out, {}, r"no complete MediaWiki dump.*after 1 article\W") for each in cut),
        (packed, out, {}, "cannot be read"),
        (tmp_path / "other.xml", out, {}, "first element is <html>"),
        (tmp_path / "a.txt", out, {"encoding": "klingon"}, "there is no encoding 'klingon'"),
        (source, tmp_path / "folder.jsonl", {}, r"folder.jsonl is a folder; give the name of a file"),
    ):
        refused(DataError, message, build, given, to, **options)
    assert not out.exists()
    assert main(["data", "wiki3029", str(source), str(out), "--sentences", "20"]) == 1
    assert "are wanted" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "expected"), [
    ("'''Bold''' and ''italic''.", "Bold and italic."),
    ("See [[Town]] and [[Town|a town]] [http://x.org here] [http://x.org].", "See Town and a town here ."),
    ("A<ref name=x>note {{cite}}</ref> b<ref name=y /> c.<!-- no -->", "A b c."),
    ("{{a|{{b|{{c}}}}}}Text.\n{| class=x\n| {| inner |}\n|}\nMore.", "Text.\n\nMore."),
    ("[[File:x.png|thumb|with [[a link]] in]]Words [[Category:Towns]]", "Words"),
    ("== Head ==\n* item\n# item\n: item\nPara &amp; more<br />end", "Para & more end"),
    ("__NOTOC__ Left { over [[ brackets", "Left { over [[ brackets"),
])  # fmt: skip
def test_markup_is_left_out(text, expected):
    assert prose(text) == expected


def test_real_articles(shared_data, tmp_path):
    out = tmp_path / "wiki.jsonl.gz"
    read, long_enough = build(shared_data / "wiki_blocks/wikitext2_articles.jsonl.gz", out, articles=20, sentences=40)
    assert read == 641
    assert long_enough > 400
    assert [len(row["sentences"]) for row in rows(out)] == [40] * 20


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


def test_bookcorpus_from_a_hub_of_this_machine_or_by_hand(tmp_path, monkeypatch):
    hub = tmp_path / "hub"
    listing = hub / "api/datasets/bookcorpus/bookcorpus/revision/refs/convert/parquet"
    listing.parent.mkdir(parents=True)
    pandas.DataFrame({"text": ["one two three .", "four five six ."]}).to_parquet(hub / "0000.parquet")
    data, path = (hub / "0000.parquet").read_bytes(), "plain_text/train/0000.parquet"
    lfs = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 1}
    files = [{"rfilename": path, "size": len(data), "blobId": "x", "lfs": lfs}]
    files.append({"rfilename": "README.md", "size": 1, "blobId": "y"})
    listing.write_text(json.dumps({"id": "bookcorpus/bookcorpus", "sha": "0" * 40, "siblings": files}))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=hub)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.hf_api.constants.HF_HUB_OFFLINE", False)
        (file,) = prepare.bookcorpus_files()
        assert (file.size, file.checksum, file.path) == (len(data), f"sha256:{lfs['sha256']}", path)
        fetched = fetch(replace(file, url=f"{address}/0000.parquet"), tmp_path / "down")
        assert fetched.read_bytes() == data
        server.shutdown()
    (tmp_path / "to").mkdir()
    prepare.bookcorpus(tmp_path / "down", tmp_path / "to")
    (made,) = (tmp_path / "to").iterdir()
    sentences = [sentence for document in documents_of(read_pieces(str(made))) for sentence in document.sentences]
    assert sentences == ["one two three .", "four five six ."]
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    refused(DataError, r"give their folder as text\.corpus", prepare.bookcorpus_files)
