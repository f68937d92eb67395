"""Cut running text into paragraphs and sentences."""

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

from dipole.core.utils.rows import Asker
from dipole.text.vocabulary import CHINESE, KATAKANA, THAI, UNSPACED

READER = Asker("text", "text.split", "text.encoding")
# Longer paragraphs are cut at a blank first, or at a sentence mark. No sentence is that long, but a file without line
# breaks can be.
LONGEST_PARAGRAPH = 100_000
TAIL = 100  # characters of a part that say whether its sentence goes on

# A word, a full stop and another word. Punkt always ends a sentence here, unless the word is an abbreviation.
PLAIN_END = re.compile(r"([A-Za-z]{2,})([.?!])\s+[\"'(]?[A-Za-z]")
_DATA = tomllib.loads(Path(__file__).with_name("splitting.toml").read_text(encoding="utf-8"))
ABBREVIATIONS = set(" ".join(_DATA["abbreviations"].values()).split())
MARKS = "".join(_DATA["marks"])
# An abbreviation with inner full stops (D.C., Ph.D., z.B.) does not end a sentence before a small letter, nor does a
# German ordinal before its noun, one letter, "no" or "fig" before a number, or one letter of Arabic or Hebrew.
DOTTED = re.compile(
    r"(?:[^\W\d_]{1,3}\.){2,}\s+([^\W\d_])|\d{1,2}\.\s+(?:Januar|Februar|M\u00e4rz|April|Mai|Ju[nl]i|August|September|"
    r"Oktober|November|Dezember|Jahrhundert)|[(\[]?(?:\w*str|art|nos?|figs?|eqs?|secs?|pp|[^\W\d_])\.\s+\d|"
    r"[\u05d0-\u05ea\u0621-\u064a]\.\s",
    re.IGNORECASE,
)
_FINAL = "|".join(map(re.escape, _DATA["final"]["abbreviations"].split()))
FINAL = re.compile(rf"(?:{_FINAL})\.(?:[\"'\u201d]|\s+[\"'(]?(?:{'|'.join(_DATA['final']['words'].split())})\b(?!\.))")
GREEK = "\u0370-\u03ff\u1f00-\u1fff"
_CLOSING = "\"')\\]}\u2019\u201d\u00bb\u203a\u300d\u300f\u3011\u300b\u3009\u3015\u3017\uff09\uff3d\uff5d\uff63"
_INDIC = "\u0900-\u0dff"
_SHAD = "\u0f0d-\u0f11"  # Tibetan
# Directions of writing, blanks without width and emoji, which can follow a mark.
_BEHIND = "\u061c\u200b\u200d-\u200f\u2060\u2066-\u2069\ufeff\ufe0f\u2600-\u27bf\U0001f000-\U0001faff"
_REPEATS = "\u0e46\u0ec6"  # Thai and Lao signs of repetition, with blanks around them
_ENDS = "|".join((
    f"(?!\u17d4(?:\u179b|\u1794\u17c1)\u17d4)[{MARKS}]",  # no Khmer "and so on"
    "\uff0e(?![0-9A-Za-z\uff10-\uff5a])",  # a full-width full stop, no decimal point
    "\u1361\u1361|(?<=[\u1200-\u137f])::",  # two Ethiopic word marks
    # A Greek semicolon, a colon for the Armenian full stop, and a bar for the danda.
    rf"(?:(?<=[{GREEK}]{{2}})[;\u037e]|(?<=[\u0561-\u0587]):|(?<=[{_INDIC}])\s?\|+)(?=[{_CLOSING}]*(?:\s|$))",
    # . ? ! between letters that have no blanks. Thai has the full stop in abbreviations only.
    rf"(?<=[{UNSPACED}])[?!]+(?=[{UNSPACED}A-Z])",
    rf"(?<=\w)(?<!\.[A-Za-z])[.?!]+(?=[{CHINESE}{KATAKANA}\u00bf\u00a1])|(?<=[{CHINESE}{KATAKANA}])[.?!]+(?=[A-Z])",
    rf"(?<=[^\W\d_]{{2}})[.?!]+(?=[{_CLOSING}]*[{_BEHIND}]+(?:\s|$))",
))  # fmt: skip
_QUOTED = f"[{MARKS}.?!]*[\u300d\u300f](?:\u3068(?!\u3066\u3082)|\u3063\u3066)"  # of Japanese, which goes on
OTHER_END = re.compile(rf"(?:{_ENDS})(?!{_QUOTED})(?:[{MARKS}.?!]|\s+[{_SHAD}])*[{_CLOSING}{_BEHIND}]*\s*")
_HAS_OTHER = re.compile(
    f"[{MARKS}\uff0e\u00bf\u00a1{_BEHIND}{GREEK}{_INDIC}{UNSPACED}{KATAKANA}\u0531-\u0587\u1200-\u137f]"
)
_BULLETS = re.compile(r"\n(?=[ \t]*[-*\u2022\u2023\u25e6\u2043\u00b7][ \t]+\S)")
_NUMBERS = re.compile(_BULLETS.pattern + r"|\n(?=[ \t]*\d{1,2}[.)][ \t]+\S)")
_FIRST = re.compile(r"^[ \t]*1[.)]\s", re.MULTILINE)
_NUMBER = re.compile(r"\d{1,2}\.")
_WORD = re.compile(r"\w")
_MARKED = re.compile(r"(?:[*_]|\[\w{1,3}\])+(?= |$)")  # the end of Markdown's emphasis, or numbers of notes
# A question, quotation or name inside of a sentence, which goes on: `"Did he?" she asked`, `the Jeopardy! host`.
_INSIDE = re.compile(rf"(?:[{MARKS}.?!;\u2026](?: ?[\u00bb\u203a]|[{_CLOSING}\u201c\u00ab*_]+)|\w [A-Z]\w*!)$")
_ASKED = re.compile(r"[?!\u2026]$")
# Borders, written as U+FFFF, that are none: before a company's form, and before the Korean particles of speech.
_NO_BORDER = re.compile(
    "!\uffff(?:Inc|Corp|Co|Ltd)\\b"
    "|[\"'\u2019\u201d]\uffff(?:\uc774?\ub77c[\uace0\uba70\ub294]|\ud558(?:\uba70|\uace0(?! \uc2f6)))"
)
# A blank behind an opening mark of French, behind an abbreviation in Indian text whose mark is the danda, and inside of
# a date in numbers (3. 5. 2020).
_NO_END = re.compile(
    f"(?:(?<=[\u00ab\u2039])(?<!\\S.)|(?<=[{_INDIC}]\\.)(?=[^\u0964]*\u0964)) "
    r"|\b[0-3]?\d\. ?[01]?\d\. (?=(?:19|20)\d\d\b)"
)
_THAI_BLANK = re.compile(f"(?<=[{THAI}])(?<![{_REPEATS}]) (?=[{THAI}])(?![{_REPEATS}\u0e2f\u0eaf])")


@cache
def punkt(with_finals: bool = False) -> Any:
    """Return NLTK's tokenizer. An abbreviation before a word of `FINAL` ends a sentence `with_finals`."""
    module = READER.package("nltk.tokenize.punkt")
    parameters = module.PunktParameters()
    parameters.abbrev_types = ABBREVIATIONS

    class Punkt(module.PunktSentenceTokenizer):  # type: ignore[name-defined]
        """NLTK's tokenizer with a shortcut for plain sentence ends, which halves its time."""

        def text_contains_sentbreak(self, text: str) -> bool:
            dotted = DOTTED.match(text)
            if dotted and (dotted[1] is None or dotted[1].islower()):
                return False
            if with_finals and FINAL.match(text):
                return True
            end = PLAIN_END.match(text)
            if end and (end[2] != "." or end[1].lower() not in parameters.abbrev_types):
                return True
            return bool(super().text_contains_sentbreak(text))

    return Punkt(parameters)


def split_sentences(text: str) -> list[str]:
    """Cut running text into sentences with NLTK's Punkt and a fixed list of abbreviations.

    Marks of other scripts end a sentence with the closing quotation marks behind them (UAX 29, rules SB9 to SB11), and
    blanks between two letters of Thai and Lao do. So do a blank line and the beginning of an item of a list on a line.
    """
    sentences: list[str] = []
    for paragraph in paragraphs(StringIO(text)):
        items = _NUMBERS if _FIRST.search(paragraph) else _BULLETS
        for item in items.split(paragraph):
            found: list[str] = []
            for part in _parts(" ".join(item.split())):
                for each in _cut(_NO_END.sub(lambda blank: blank[0].replace(" ", "\uffff"), part)):
                    if found and _goes_on(found[-1][-TAIL:], each):
                        found[-1] += f" {each}"
                    else:
                        found.append(each)
            sentences += [each.replace("\uffff", " ") for each in found]
    return sentences


def _goes_on(before: str, after: str) -> bool:
    """Return whether two parts are one sentence: a small letter follows a quotation, or a dash and it a question."""
    if _NO_BORDER.search(f"{before[-6:]}\uffff{after[:8]}"):
        return True
    words = after.lstrip("-\u2013\u2014 ")
    if not words[:1].islower() or words[1:2].isupper():
        return False
    if _INSIDE.search(before):
        return True
    return words != after and bool(_ASKED.search(before))


def _cut(part: str) -> Iterator[str]:
    """Yield Punkt's sentences. A number alone, as of a list, belongs to the next one, and marks alone to the last."""
    begin = end = 0
    for start, stop in punkt(with_finals=True).span_tokenize(part):
        if start == end and (closing := _MARKED.match(part, start)):
            end = closing.end()
            start = min(end + 1, stop)
        # No blank before it, as in `Ok!!` and `"Hm."he said`.
        is_inside = start == end and part[start : start + 1] not in "[({*"
        if end and not (is_inside or _NUMBER.fullmatch(part, begin, end) or not _WORD.search(part, start, stop)):
            yield part[begin:end]
            begin = start
        end = stop
    if end:
        yield part[begin:end]


def _parts(paragraph: str) -> list[str]:
    """Cut a paragraph at the sentence marks that Punkt does not know."""
    if paragraph.isascii() or not _HAS_OTHER.search(paragraph):
        return [paragraph]
    ends = [0, *(match.end() for match in OTHER_END.finditer(paragraph)), len(paragraph)]
    parts = [part for start, end in pairwise(ends) if (part := paragraph[start:end].strip())]
    if 2 * len(re.findall(f"[{THAI}]", paragraph)) > len(paragraph):
        parts = [piece for part in parts for piece in _THAI_BLANK.split(part)]
    return parts


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
            ends = (match.end() for match in OTHER_END.finditer(held, 0, LONGEST_PARAGRAPH))
            end = max(*blanks, 0) or max(ends, default=LONGEST_PARAGRAPH)
            yield held[:end]
            held = held[end:]
    yield held
