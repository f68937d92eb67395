"""Running text as sentences, whole or as it comes: a stream gives the same sentences as the text in one piece."""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from dipole.core.utils.rows import Asker

READER = Asker("text", "text.split", "text.encoding")
# A longer piece of text is cut at a blank before sentences are sought in it: no sentence is that long, files are.
PIECE = 100_000
BLOCK = 1_000_000  # characters of a stream that are looked at together
BLANK_LINE = re.compile(r"\n\s*\n")

# A word of letters, its end and a word behind it: unless it is an abbreviation, Punkt always ends a sentence there.
PLAIN_END = re.compile(r"([A-Za-z]{2,})([.?!])\s+[\"'(]?[A-Za-z]")
ABBREVIATIONS = (
    "mr mrs ms dr prof rev hon st sr jr messrs mme mlle gen col maj capt lieut lt sgt cpl gov pres sen rep "
    "vs etc e.g i.e cf al viz no vol vols pp ed eds fig figs sec eq ch inc ltd co corp bros dept univ "
    "jan feb mar apr jun jul aug sep sept oct nov dec mt ft a.m p.m b.c a.d u.s u.k esq"
)


@cache
def _punkt() -> Any:
    punkt = READER.package("nltk.tokenize.punkt")
    parameters = punkt.PunktParameters()
    parameters.abbrev_types = set(ABBREVIATIONS.split())

    class Punkt(punkt.PunktSentenceTokenizer):  # type: ignore[name-defined]
        """NLTK's, which looks closely only at what does not tell at once: half of its time."""

        def text_contains_sentbreak(self, text: str) -> bool:
            end = PLAIN_END.match(text)
            if end and (end[2] != "." or end[1].lower() not in parameters.abbrev_types):
                return True
            return bool(super().text_contains_sentbreak(text))

    return Punkt(parameters)


def split_sentences(text: str) -> list[str]:
    """Cut running text into sentences with NLTK's Punkt and a fixed list of English abbreviations (no model download).

    Blank lines end a sentence; other line breaks are blanks.
    """
    out = []
    for paragraph in BLANK_LINE.split(text):
        for piece in _pieces(" ".join(paragraph.split())):
            out += _punkt().tokenize(piece)
    return [sentence for sentence in out if sentence]


def stretches(chunks: Iterable[str]) -> Iterator[str]:
    """Join and cut a stream of text so that the sentences of the parts, one after another, are those of the whole.

    A part holds whole paragraphs, or pieces of one that is longer than `PIECE`: no more than some millions of
    characters are held, whatever the text is.
    """
    held, going_on = "", ""  # text that was not looked at, and the rest of a long paragraph with its blanks made single
    waiting: list[str] = []
    size = 0
    for chunk in chunks:
        waiting.append(chunk)
        size += len(chunk)
        if size < BLOCK:
            continue
        held += "".join(waiting)
        waiting = []
        head = held.rstrip()
        *whole, last = BLANK_LINE.split(head)
        blanks = held[len(head) :]
        blanks = "\n\n" if blanks.count("\n") > 1 else "\n" if "\n" in blanks else blanks[:1]
        if going_on and whole:
            whole[:1] = _pieces(_glued(going_on, whole[0]).rstrip())
            going_on = ""
        if going_on or len(last) > PIECE:
            cuts, going_on = _settled(_glued(going_on, last))
            whole += cuts
            held = blanks
        else:
            held = last + blanks
        size = len(held)
        if whole:
            yield "\n\n".join(whole)
    first, *others = BLANK_LINE.split(held + "".join(waiting))
    parts = [*(_pieces(_glued(going_on, first).rstrip()) if going_on else [first]), *others]
    if any(part.strip() for part in parts):
        yield "\n\n".join(parts)


def _glued(before: str, text: str) -> str:
    """A paragraph and how it goes on, blanks made single; one at the start is where it was cut before."""
    more = re.sub(r"\s+", " ", text)
    return before + more[1 if more.startswith(" ") and (not before or before.endswith(" ")) else 0 :]


def _pieces(text: str) -> Iterator[str]:
    cuts, rest = _settled(text, 0)
    yield from cuts
    if rest:
        yield rest.strip()


def _settled(text: str, margin: int = 1) -> tuple[list[str], str]:
    """Pieces from the start of a text, and its rest; with a margin of 1 a blank at the end does not count."""
    found, start = [], 0
    while len(text) - start > PIECE + margin:
        end = text.rfind(" ", start, start + PIECE)
        end = end if end > start else start + PIECE
        found.append(text[start:end].strip())
        start = end
    return found, text[start:]
