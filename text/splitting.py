"""Cut running text into paragraphs and sentences."""

import re
from collections.abc import Iterator
from functools import cache
from io import StringIO
from typing import Any, TextIO

from dipole.core.utils.rows import Asker

READER = Asker("text", "text.split", "text.encoding")
# Longer paragraphs are cut at a blank first. No sentence is that long, but a file without line breaks can be.
LONGEST_PARAGRAPH = 100_000

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
    sentences: list[str] = []
    for paragraph in paragraphs(StringIO(text)):
        sentences += _punkt().tokenize(" ".join(paragraph.split()))
    return sentences


def paragraphs(text: TextIO) -> Iterator[str]:
    """Yield the paragraphs of a text, which blank lines divide, in parts of at most `LONGEST_PARAGRAPH` characters."""
    held = ""
    starts_line = True
    while line := text.readline(LONGEST_PARAGRAPH):
        is_blank = starts_line and line.isspace()
        starts_line = line.endswith("\n")
        if is_blank:
            yield held
            held = ""
            continue
        held += line
        while len(held) > LONGEST_PARAGRAPH and len(held.rstrip()) > LONGEST_PARAGRAPH:
            blanks = [held.rfind(blank, 1, LONGEST_PARAGRAPH) for blank in " \n"]
            end = max(*blanks, 0) or LONGEST_PARAGRAPH
            yield held[:end]
            held = held[end:]
    yield held
