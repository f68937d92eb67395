"""MediaWiki dumps as plain prose: pages one by one, without what is no running text."""

import bz2
import gzip
import html
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any
from xml.etree import ElementTree

from dipole.core.utils.errors import DataError
from dipole.core.utils.text import counted

DEEPEST = 40  # templates, tables and links within each other, at most
# Links into these namespaces are no words, in whatever language a dump names its own.
NAMESPACES = frozenset({"file", "image", "category", "media"})
DROPPED_TAGS = "ref|gallery|math|chem|timeline|imagemap|score|syntaxhighlight|source|code|pre|nowiki|table|graph|poem"


def is_dump(path: Path) -> bool:
    """Return whether a file is a dump by its name, as `enwiki-20260101-pages-articles1.xml-p1p41242.bz2` is one."""
    return re.search(r"\.xml(-p\d+p\d+)?(\.bz2|\.gz)?$", path.name) is not None


def pages(path: Path) -> Iterator[tuple[str, str]]:
    """Title and wikitext of the articles (namespace 0, no redirects) of a dump, plain or packed, in its order."""
    seen = 0
    try:
        with _opened(path) as file:
            for title, text in _articles(file):
                seen += 1
                yield title, text
    except ElementTree.ParseError as error:
        raise DataError(
            f"{path} is no complete MediaWiki dump: {error}, after {counted(seen, 'article')}. Load it anew, or give "
            "another one."
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read, after {counted(seen, 'article')}: {error}") from error


def _opened(path: Path) -> IO[bytes]:
    openers: dict[str, Any] = {".bz2": bz2.open, ".gz": gzip.open}
    found: IO[bytes] = openers.get(path.suffix, open)(path, "rb")
    return found


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
