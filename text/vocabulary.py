"""From text to word or subword ids: vocabularies by frequency, Hugging Face tokenizers, word vectors, expansion."""

import hashlib
import heapq
import re
import unicodedata
from collections.abc import Callable, Container, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordLevel
from tokenizers.trainers import WordLevelTrainer

from dipole.core.utils.errors import DataError

UNKNOWN = "<unk>"
# Words as the Penn Treebank cuts them where that matters for a bag of words: contractions apart, numbers and hyphenated
# words whole, every other mark alone. Text that is already cut this way (SentEval's files) stays as it is.
PATTERN = (
    r"\w+(?=n['’]t\b)|n['’]t\b|['’](?:s|re|ve|ll|d|m|S|RE|VE|LL|D|M)\b"
    r"|\w+(?:[-.,/]\w+)*|\.{2,}|-{2,}|``|''|[^\w\s]"
)


def _configure(tokenizer: Tokenizer, lower: bool) -> Tokenizer:
    # An empty sentence is read as a full stop, as in SentEval's examples.
    parts = [normalizers.NFC(), normalizers.Replace(Regex(r"^\s*$"), ".")]
    if lower:
        parts.append(normalizers.Lowercase())
    tokenizer.normalizer = normalizers.Sequence(parts)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERN), behavior="removed", invert=True)
    return tokenizer


def build_vocabulary(sentences: Iterable[str], size: int = 50_000, lower: bool = False) -> "Tokens":
    """Take the `size` most frequent words, id 0 for every other. Ties are broken by alphabetical order."""
    tokenizer = _configure(Tokenizer(WordLevel({UNKNOWN: 0}, unk_token=UNKNOWN)), lower)
    trainer = WordLevelTrainer(vocab_size=size + 1, special_tokens=[UNKNOWN], show_progress=False)
    tokenizer.train_from_iterator(sentences, trainer)
    return Tokens(tokenizer)


def counted_vocabulary(counts: Iterable[tuple[str, int]], size: int, lower: bool = False) -> "Tokens":
    """Build the vocabulary of `build_vocabulary` from words and their counts."""
    best = heapq.nsmallest(size, ((-count, word) for word, count in counts))
    tokens = words_vocabulary([word for _, word in best], lower)
    tokens.tokenizer.add_special_tokens([UNKNOWN])  # as the library's trainer does
    return tokens


@cache
def word_cutter(lower: bool = False) -> Callable[[str], list[str]]:
    """Return a function that cuts a sentence into words."""
    tokenizer = _configure(Tokenizer(WordLevel({UNKNOWN: 0}, unk_token=UNKNOWN)), lower)
    normal, cut = tokenizer.normalizer, tokenizer.pre_tokenizer
    return lambda sentence: [word for word, _ in cut.pre_tokenize_str(normal.normalize_str(sentence))]


def words_vocabulary(words: Sequence[str], lower: bool = False) -> "Tokens":
    """Make a vocabulary of the given words, ids from 1 in their order (0 is every other word)."""
    index = {UNKNOWN: 0}
    for word in words:
        index.setdefault(word, len(index))
    return Tokens(_configure(Tokenizer(WordLevel(index, unk_token=UNKNOWN)), lower))


def load_tokens(source: str | Path) -> "Tokens":
    """Load a Hugging Face tokenizer: a tokenizer.json, a folder that holds one, or a name on the Hub."""
    path = Path(source)
    if path.is_dir() and (path / "tokenizer.json").is_file():
        path = path / "tokenizer.json"
    try:
        if path.is_file():
            return Tokens(Tokenizer.from_file(str(path)))
        from transformers import AutoTokenizer

        loaded: Any = AutoTokenizer.from_pretrained(str(source))
        return Tokens(loaded._tokenizer)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise DataError(
            f"no tokenizer at {source}: {str(error).splitlines()[0]}. Give a tokenizer.json, a folder that holds one, "
            f"a name on the Hugging Face Hub, or 'words'."
        ) from error


class Tokens:
    """A tokenizer and its vocabulary. Wraps `tokenizers.Tokenizer` so that words and subwords are one thing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.index = tokenizer.get_vocab()
        self.words_only = isinstance(tokenizer.model, WordLevel)
        # An empty sentence is read as a full stop, as in SentEval's examples.
        self.empty = self.index.get(".", self.index.get(UNKNOWN, self.index.get("[UNK]", 0)))

    def __len__(self) -> int:
        return max(self.index.values()) + 1

    def encode(self, sentences: Sequence[str], max_length: int | None = None) -> list[list[int]]:
        """Return the ids of every sentence, cut after `max_length`. An empty sentence becomes a full stop."""
        found = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(sentences))]
        if max_length is not None:
            # A subword tokenizer closes a sentence with a mark ([SEP]), which is never cut off.
            closing = int(not self.words_only and self.tokenizer.num_special_tokens_to_add(False) > 0)
            for place, ids in enumerate(found):
                if len(ids) > max_length:
                    found[place] = ids[: max_length - closing] + ids[len(ids) - closing :]
        return [ids or [self.empty] for ids in found]

    def words(self) -> list[str]:
        """Return all tokens in the order of their ids."""
        out = [""] * len(self)
        for word, i in self.index.items():
            out[i] = word
        return out

    @property
    def fingerprint(self) -> str:
        """Content hash."""
        return hashlib.sha256(self.tokenizer.to_str().encode()).hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Write a tokenizer.json."""
        self.tokenizer.save(str(path))


def read_vectors(path: str | Path, wanted: Container[str] | None = None) -> tuple[list[str], np.ndarray]:
    """Read word vectors in the text format of GloVe or word2vec (whose first line gives count and width).

    Return words, only those `wanted`, and their vectors (n, width) in float32. Raise DataError for a damaged file.
    """
    words: list[str] = []
    rows: list[np.ndarray] = []
    seen: set[str] = set()
    width = 0
    try:
        with Path(path).open(encoding="utf-8", errors="replace", newline="\n") as file:
            for number, line in enumerate(file, 1):
                fields = line.rstrip().split(" ")
                if number == 1 and len(fields) == 2 and all(field.isdigit() for field in fields):
                    width = int(fields[1])
                    continue
                width = width or len(fields) - 1
                if len(fields) < 2 or len(fields) - 1 < width:
                    raise DataError(
                        f"{path}, line {number}: {len(fields) - 1} numbers after the word, expected {width}"
                    )
                word = " ".join(fields[: len(fields) - width])  # GloVe 840B has a few words with blanks
                if word in seen or (wanted is not None and word not in wanted):
                    continue
                try:
                    rows.append(np.array(fields[len(fields) - width :], dtype=np.float32))
                except ValueError:
                    raise DataError(
                        f"{path}, line {number}: the vector of {word!r} holds something else than numbers"
                    ) from None
                words.append(word)
                seen.add(word)
    except OSError as error:
        raise DataError(f"word vectors {path} cannot be read: {error.strerror}") from error
    if not words and wanted is None:
        raise DataError(f"{path} holds no word vectors")
    if not rows:
        return [], np.zeros((0, width), dtype=np.float32)
    return words, np.stack(rows)


def expand(
    index: dict[str, int], table: np.ndarray, vector_words: Sequence[str], vectors: np.ndarray
) -> tuple[list[str], np.ndarray]:
    """Map the vectors of new words into a trained table (Kiros et al. 2015, Sec. 2.2, and the Quick-Thought code).

    The map is linear with intercept, fitted by least squares on the shared words. Words with an underscore (phrases of
    word2vec) are skipped.

    Args:
        index: word -> row of the table. table: (V, d) trained. vectors: (n, m) of `vector_words`.

    Returns:
        the added words, and their embeddings (k, d).
    """
    shared = [i for i, word in enumerate(vector_words) if word in index and index[word] != 0]
    if not shared:
        raise DataError("expansion of the vocabulary: no word of the vector file is in the trained vocabulary")
    design = np.concatenate([vectors[shared], np.ones((len(shared), 1), dtype=vectors.dtype)], 1).astype(np.float64)
    target = table[[index[vector_words[i]] for i in shared]].astype(np.float64)
    solution, *_ = np.linalg.lstsq(design, target, rcond=None)
    new = [i for i, word in enumerate(vector_words) if word not in index and "_" not in word]
    mapped = vectors[new].astype(np.float64) @ solution[:-1] + solution[-1]
    return [vector_words[i] for i in new], mapped.astype(table.dtype)


# Unicode categories that both libraries treat alike.
ALIKE = frozenset(("Lu", "Ll", "Lt", "Lm", "Lo", "Nd", "Po", "Ps", "Pe", "Pi", "Pf", "Pd", "Sm", "Sc", "Sk"))
EMPTY = -1  # number of a sentence without words
WORD_OR_END = re.compile(PATTERN + "|\n")


def number_words(sentences: Sequence[str], lower: bool) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Number words in the order of their first occurrence.

    Returns:
        (T,) int32 numbers, EMPTY for a sentence without words, (n,) int32 lengths of the sentences, and the words.
    """
    index: dict[str, int] = {}
    if not sentences:
        return np.zeros(0, np.int32), np.zeros(0, np.int32), []
    end = -2
    numbers = np.array(
        [end if word == "\n" else index.setdefault(word, len(index)) for word in _words(sentences, lower)], np.int32
    )
    bounds = np.flatnonzero(numbers == end)
    lengths = np.diff(bounds, prepend=-1) - 1
    numbers[bounds[lengths == 0]] = EMPTY
    return numbers[numbers != end], lengths.clip(min=1).astype(np.int32), list(index)


def _words(sentences: Sequence[str], lower: bool) -> list[str]:
    """Return the words of all sentences, with a line break after each sentence."""
    joined = "\n".join(sentences) + "\n"
    is_plain = UNKNOWN not in joined and joined.count("\n") == len(sentences) and all(map(str.strip, sentences))
    if is_plain and _plain().fullmatch(joined):
        if lower:
            joined = joined.lower()
        return WORD_OR_END.findall(joined)
    if len(sentences) > 1:
        half = len(sentences) // 2
        return _words(sentences[:half], lower) + _words(sentences[half:], lower)
    words: list[str] = []
    for number, part in enumerate(sentences[0].split(UNKNOWN)):  # the tokenizer reads "<unk>" as one token
        if number:
            words.append(UNKNOWN)
        if part or sentences[0] == part:
            words += word_cutter(lower)(part)
    return [*words, "\n"]


@cache
def _plain() -> re.Pattern[str]:
    """Match text of characters that both libraries treat alike and that neither compose nor decompose."""
    characters = [
        c
        for c in map(chr, range(33, 0xFFFF))
        if unicodedata.category(c) in ALIKE
        and unicodedata.normalize("NFC", c) == c
        and not "\u1100" <= c <= "\u11ff"  # parts of Korean syllables, which compose
        and c not in "\u03a3\u0130"  # their lower case depends on the neighbours, or has two characters
    ]
    ranges: list[list[int]] = []
    for number in (32, *map(ord, characters), ord("_")):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return re.compile("[\n" + "".join(f"{re.escape(chr(a))}-{re.escape(chr(b))}" for a, b in ranges) + "]*")
