"""Wiki-3029 as Arora et al. describe it: 3,029 articles as classes, 200 sentences of each, of a dump or any folder."""

import gzip
import hashlib
import heapq
import html
import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO
from xml.etree import ElementTree

from dipole.core.utils.errors import DataError
from dipole.core.utils.files import atomic_write, disk_refusing
from dipole.core.utils.rows import DAMAGED, ROWS, ends_with, open_bytes, visible
from dipole.core.utils.text import counted
from dipole.text.corpus import Document, Unit, documents_of, file_pieces, split_sentences

TELL_SECONDS = 10.0
DEEPEST = 40  # templates, tables and links within each other, at most
# Links into these namespaces are no words, in whatever language a dump names its own.
NAMESPACES = frozenset({"file", "image", "category", "media"})
DROPPED_TAGS = "ref|gallery|math|chem|timeline|imagemap|score|syntaxhighlight|source|code|pre|nowiki|table|graph|poem"


def build(
    source: Path,
    out: Path,
    *,
    articles: int = 3029,
    sentences: int = 200,
    words: int = 4,
    seed: int = 0,
    unit: Unit = "documents",
    encoding: str = "utf-8",
) -> tuple[int, int]:
    """Write `articles` rows of an `id` and `sentences` sentences as JSON lines, what the recipe wiki3029-blocks reads.

    Articles with enough different sentences of `words` words or more, and their sentences, are drawn by seed and
    article alone. Arora et al. 2019, Sec. 8, say only the two numbers. Return how many were read and are long enough.
    """
    if not out.name.endswith((".jsonl", ".jsonl.gz")):
        raise DataError(f"{out} must be named NAME.jsonl or NAME.jsonl.gz.")
    if out.is_dir():
        raise DataError(f"{out} is a folder; give the name of a file to write.")
    # The articles with the largest numbers of their own, smallest first: no more than are wanted are ever held.
    kept: list[tuple[int, str, list[str]]] = []
    read = long_enough = 0
    told = time.monotonic()
    for document in _documents(source, unit, encoding):
        read += 1
        different = dict.fromkeys(" ".join(s.split()) for s in document.sentences)
        usable = [s for s in different if len(re.findall(r"\w+", s)) >= words]
        if len(usable) >= sentences:
            long_enough += 1
            own = hashlib.sha256(f"{seed}/{document.name}/{usable[0]}".encode()).digest()
            number = int.from_bytes(own[:16], "big")
            if len(kept) < articles or number > kept[0][0]:
                drawn = random.Random(int.from_bytes(own, "big")).sample(usable, sentences)
                heapq.heappush(kept, (number, document.name, drawn))
                if len(kept) > articles:
                    heapq.heappop(kept)
        if time.monotonic() - told > TELL_SECONDS:
            told = time.monotonic()
            print(f"{counted(read, 'article')} read, {long_enough} long enough", file=sys.stderr, flush=True)
    if long_enough < articles:
        raise DataError(
            f"{source}: {long_enough} of {counted(read, 'article')} have {counted(sentences, 'different sentence')} of "
            f"{counted(words, 'word')}, and {articles} are wanted. Give more text, or fewer with --articles or "
            "--sentences; nothing was written."
        )
    rows = [{"id": name, "sentences": drawn} for name, drawn in sorted(each[1:] for each in kept)]
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    if out.name.endswith(".gz"):
        data = gzip.compress(data, mtime=0)  # without a date the same articles are the same file
    with disk_refusing(f"cannot write {out}", DataError, "OUT"):
        atomic_write(out, data)
    return read, long_enough


def _documents(source: Path, unit: Unit, encoding: str) -> Iterator[Document]:
    """The articles of a source one by one, files of a folder in order of their names."""
    fix = "Give a MediaWiki dump, a file of articles, or a folder of them."
    if not source.exists():
        raise DataError(f"nothing is at {source}. {fix}")
    files = [path for path in visible(source) if path.is_file()] if source.is_dir() else [source]
    if not files:
        raise DataError(f"the folder {source} holds no file. {fix}")
    for file in files:
        if is_dump(file):
            yield from (Document(title, split_sentences(text)) for title, text in pages(file))
            continue
        inside = file.relative_to(source).as_posix() if file != source else file.name
        if ends_with(file, ROWS):
            for document in documents_of(file_pieces(file, "documents", None, encoding)):
                yield Document(f"{inside}: {document.name}", document.sentences)  # rows of several files share numbers
        else:
            for document in documents_of(file_pieces(file, unit, None, encoding)):
                yield Document(inside, document.sentences)


def is_dump(path: Path) -> bool:
    """Return whether a file is a dump by its name, as `enwiki-20260101-pages-articles1.xml-p1p41242.bz2` is one."""
    return re.search(r"\.xml(-p\d+p\d+)?(\.bz2|\.gz|\.xz|\.zst)?$", path.name) is not None


def pages(path: Path) -> Iterator[tuple[str, str]]:
    """Title and wikitext of the articles (namespace 0, no redirects) of a dump, plain or packed, in its order."""
    seen = 0
    try:
        with open_bytes(path) as file:
            for article in _articles(file):
                seen += 1
                yield article
    except ElementTree.ParseError as error:
        raise DataError(
            f"{path} is no complete MediaWiki dump: {error}, after {counted(seen, 'article')}. Load it anew, or give "
            "another one."
        ) from None
    except DAMAGED as error:
        raise DataError(f"{path} cannot be read, after {counted(seen, 'article')}: {error}") from error


def _articles(file: IO[bytes]) -> Iterator[tuple[str, str]]:
    namespaces = set(NAMESPACES)
    events = ElementTree.iterparse(file, events=("start", "end"))
    _, root = next(events)
    if _name(root) != "mediawiki":
        raise ElementTree.ParseError(f"its first element is <{_name(root)}>, not <mediawiki>")
    for event, element in events:
        if event != "end":
            continue
        name = _name(element)
        if name == "namespace" and element.get("key") in ("-2", "6", "14") and element.text:
            namespaces.add(element.text.lower())
        elif name == "page":
            found = {_name(each): each for each in element.iter()}
            text = found.get("text")
            in_articles = "ns" not in found or found["ns"].text == "0"
            if in_articles and "redirect" not in found and text is not None and text.text and "title" in found:
                yield found["title"].text or "", prose(text.text, namespaces)
            # Free the memory of what was read.
            root.clear()


def _name(element: ElementTree.Element) -> str:
    return str(element.tag).rpartition("}")[2]


def prose(text: str, namespaces: frozenset[str] | set[str] = NAMESPACES) -> str:
    """The paragraphs of a wikitext, blank lines between them: no templates, tables, lists, headings or notes."""
    text = re.sub(r"<!--.*?(-->|$)", "", text, flags=re.S)
    text = re.sub(rf"<({DROPPED_TAGS})\b[^>]*/\s*>", "", text, flags=re.I)
    text = re.sub(rf"<({DROPPED_TAGS})\b[^>]*>.*?</\1\s*>", "", text, flags=re.I | re.S)
    text = _innermost_first(r"\{\{[^{}]*\}\}|\{\{\{[^{}]*\}\}\}", lambda match: "", text)
    text = _innermost_first(r"\{\|(?:(?!\{\||\|\}).)*\|\}", lambda match: "", text)

    def words_of(link: re.Match[str]) -> str:
        target, *shown = link[1].split("|")
        namespace, colon, _ = target.strip().partition(":")  # empty if it starts with ":", as a link in the text does
        if colon and namespace.strip().lower() in namespaces:
            return ""
        return (shown or [target])[-1]

    text = _innermost_first(r"\[\[([^\[\]]*)\]\]", words_of, text)
    text = re.sub(r"\[(?:https?:|ftp:|mailto:)?//\S+\s+([^\]]*)\]", r"\1", text)
    text = re.sub(r"\[(?:https?:|ftp:|mailto:)?//[^\]]*\]", "", text)
    text = re.sub(r"<br\s*/?>", " ", text, flags=re.I)
    text = html.unescape(re.sub(r"<[^<>\n]*>", "", text))
    text = re.sub(r"'{2,}", "", text)
    text = re.sub(r"__[A-Z]+__", "", text)
    lines = (line.strip() for line in text.split("\n"))
    return "\n\n".join(line for line in lines if line and line[0] not in "*#:;|!={}")


def _innermost_first(pattern: str, replacement: Callable[[re.Match[str]], str], text: str) -> str:
    for _ in range(DEEPEST):
        text, count = re.subn(pattern, replacement, text, flags=re.S)
        if not count:
            break
    return text
