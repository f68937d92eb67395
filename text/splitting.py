"""Cut running text into sentences, from one string or from a stream of parts."""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from dipole.core.utils.rows import Asker

READER = Asker("text", "text.split", "text.encoding")
# Longer paragraphs are cut at a blank first. No sentence is that long, but a file without line breaks can be.
LONGEST_PARAGRAPH = 100_000
BLOCK = 1_000_000  # characters of a stream that are read before the next cut
BLANK_LINE = re.compile(r"\n\s*\n")

# A word, a full stop and another word. Punkt always ends a sentence here, unless the word is an abbreviation.
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
        """NLTK's tokenizer with a shortcut for plain sentence ends, which halves its time."""

        def text_contains_sentbreak(self, text: str) -> bool:
            end = PLAIN_END.match(text)
            if end and (end[2] != "." or end[1].lower() not in parameters.abbrev_types):
                return True
            return bool(super().text_contains_sentbreak(text))

    return Punkt(parameters)


def split_sentences(text: str) -> list[str]:
    """Cut running text into sentences with NLTK's Punkt and a fixed list of English abbreviations.

    A blank line ends a sentence. Other line breaks count as blanks. No model is downloaded.
    """
    sentences = []
    for paragraph in BLANK_LINE.split(text):
        for piece in _short_pieces(" ".join(paragraph.split())):
            sentences += _punkt().tokenize(piece)
    return [sentence for sentence in sentences if sentence]


def stretches(chunks: Iterable[str]) -> Iterator[str]:
    """Regroup a stream of text so that no sentence is cut: the parts have the sentences of the whole text.

    A part holds complete paragraphs, or pieces of one that is longer than `LONGEST_PARAGRAPH`. Memory is bounded by
    some millions of characters.
    """
    held = ""  # text after the last complete paragraph
    open_paragraph = ""  # the rest of a long paragraph, with single blanks
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
        *complete, last = BLANK_LINE.split(head)
        blanks = held[len(head) :]
        if blanks.count("\n") > 1:
            blanks = "\n\n"
        elif "\n" in blanks:
            blanks = "\n"
        else:
            blanks = blanks[:1]
        if open_paragraph and complete:
            complete[:1] = _short_pieces(_joined(open_paragraph, complete[0]).rstrip())
            open_paragraph = ""
        if open_paragraph or len(last) > LONGEST_PARAGRAPH:
            pieces, open_paragraph = _cut_long(_joined(open_paragraph, last))
            complete += pieces
            held = blanks
        else:
            held = last + blanks
        size = len(held)
        if complete:
            yield "\n\n".join(complete)
    first, *others = BLANK_LINE.split(held + "".join(waiting))
    if open_paragraph:
        parts = [*_short_pieces(_joined(open_paragraph, first).rstrip()), *others]
    else:
        parts = [first, *others]
    if any(part.strip() for part in parts):
        yield "\n\n".join(parts)


def _joined(before: str, text: str) -> str:
    """Append text to a paragraph with single blanks. A blank at a cut is dropped."""
    more = re.sub(r"\s+", " ", text)
    if more.startswith(" ") and (not before or before.endswith(" ")):
        more = more[1:]
    return before + more


def _short_pieces(text: str) -> Iterator[str]:
    pieces, rest = _cut_long(text, 0)
    yield from pieces
    if rest:
        yield rest.strip()


def _cut_long(text: str, margin: int = 1) -> tuple[list[str], str]:
    """Cut pieces from the start of a long text and return the rest. With a margin of 1 a final blank is free."""
    pieces, start = [], 0
    while len(text) - start > LONGEST_PARAGRAPH + margin:
        end = text.rfind(" ", start, start + LONGEST_PARAGRAPH)
        if end <= start:
            end = start + LONGEST_PARAGRAPH
        pieces.append(text[start:end].strip())
        start = end
    return pieces, text[start:]
