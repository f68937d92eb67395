"""Words of many sentences as numbers, found as the word tokenizer finds them, several times as fast.

The tokenizer's expression is run by Python over thousands of sentences at once. Where Python's classes of characters
and those of the tokenizers library could differ (combining marks, superscripts, what is not yet assigned), or a
sentence is not in the normal form of composed characters, that library itself cuts the sentence.
"""

import re
import unicodedata
from collections.abc import Sequence
from functools import cache

import numpy as np

from dipole.text.vocabulary import PATTERN, UNKNOWN, word_cutter

# Of these categories both libraries say the same.
ALIKE = frozenset(("Lu", "Ll", "Lt", "Lm", "Lo", "Nd", "Po", "Ps", "Pe", "Pi", "Pf", "Pd", "Sm", "Sc", "Sk"))
EMPTY = -1
"""In place of the words of a sentence that has none."""
WORD_OR_END = re.compile(PATTERN + "|\n")


class WordIds:
    """Numbers words in the order in which they first come, and counts them."""

    def __init__(self, lower: bool = False) -> None:
        self.index: dict[str, int] = {}
        self.counts = np.zeros(0, dtype=np.int64)
        self._lower = lower

    def number(self, sentences: Sequence[str], max_length: int) -> tuple[np.ndarray, np.ndarray]:
        """Count all words of some sentences, and number the first `max_length` of each.

        Returns:
            (T,) int32 numbers, EMPTY for a sentence without words, and the (n,) lengths.
        """
        if not sentences:
            return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64)
        index = self.index
        ends = -2
        numbers = np.array(
            [ends if word == "\n" else index.setdefault(word, len(index)) for word in self._words(sentences)], np.int32
        )
        is_end = numbers == ends
        found = np.bincount(numbers[~is_end], minlength=len(index))
        found[: len(self.counts)] += self.counts
        for sentence in sentences if UNKNOWN in "\n".join(sentences) else ():
            if UNKNOWN in sentence:
                found = self._recounted(sentence, found)
        self.counts = found
        bounds = np.flatnonzero(is_end)
        lengths = np.diff(bounds, prepend=-1) - 1
        numbers[bounds[lengths == 0]] = EMPTY
        # The place within a sentence; the mark at its end stays only where it stands for a sentence without words.
        place = np.arange(len(numbers)) - np.repeat(bounds - lengths, lengths + 1)
        return numbers[(place < max_length) & (numbers != ends)], np.minimum(lengths, max_length).clip(min=1)

    def _recounted(self, sentence: str, counts: np.ndarray) -> np.ndarray:
        """The sign of an unknown word is counted as the words that it is cut into, and numbered as one."""
        words = word_cutter(self._lower)(sentence)
        places = [self.index.setdefault(word, len(self.index)) for word in words]
        counts = np.concatenate([counts, np.zeros(len(self.index) - len(counts), dtype=counts.dtype)])
        np.subtract.at(counts, [self.index[word] for word in self._around(sentence)], 1)
        np.add.at(counts, places, 1)
        return counts

    def _around(self, sentence: str) -> list[str]:
        """The words of a sentence with signs of unknown words in it, which is cut at them first."""
        words: list[str] = []
        for number, part in enumerate(sentence.split(UNKNOWN)):
            words += [UNKNOWN] if number else []
            words += word_cutter(self._lower)(part) if part else []
        return words

    def _words(self, sentences: Sequence[str]) -> list[str]:
        """The words of all sentences, behind each sentence a line's end."""
        joined = "\n".join(sentences) + "\n"
        is_plain = UNKNOWN not in joined and joined.count("\n") == len(sentences) and all(map(str.strip, sentences))
        if is_plain and _plain().fullmatch(joined):
            return WORD_OR_END.findall(joined.lower() if self._lower else joined)
        if len(sentences) > 1:
            half = len(sentences) // 2
            return self._words(sentences[:half]) + self._words(sentences[half:])
        return [*(self._around if UNKNOWN in sentences[0] else word_cutter(self._lower))(sentences[0]), "\n"]


@cache
def _plain() -> re.Pattern[str]:
    """What a text of characters that both libraries treat alike matches; they neither compose nor decompose."""
    characters = [
        c
        for c in map(chr, range(33, 0xFFFF))
        if unicodedata.category(c) in ALIKE
        and unicodedata.normalize("NFC", c) == c
        and not "\u1100" <= c <= "\u11ff"  # parts of Korean syllables, which compose
        and c not in "\u03a3\u0130"  # whose small letters depend on what stands beside them, or are two
    ]
    ranges: list[list[int]] = []
    for number in (32, *map(ord, characters), ord("_")):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return re.compile("[\n" + "".join(f"{re.escape(chr(a))}-{re.escape(chr(b))}" for a, b in ranges) + "]*")
