"""From text to word or subword ids: vocabularies by frequency, Hugging Face tokenizers, word vectors, expansion."""

import hashlib
import heapq
import io
import json
import re
from array import array
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordLevel

from dipole.core.utils.errors import ConfigError, DataError
from dipole.core.utils.received import read_json
from dipole.core.utils.rows import DAMAGED, open_bytes

UNKNOWN = "<unk>"
# Letters of scripts that put no blank between words: each is a word of its own, as in Unicode's default word boundaries
# (UAX 29). Han and Hiragana; then Thai, Lao, Myanmar, Khmer and their neighbours, whose letters carry marks.
CHINESE = "\u2e80-\u2fd5\u3005-\u3007\u3021-\u3029\u3038-\u303b\u3041-\u3096\u309d-\u309f"
CHINESE += "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufad9\U00020000-\U0003fffd"
THAI = "\u0e01-\u0e3a\u0e40-\u0e4e\u0e81-\u0ece\u0edc-\u0edf"
UNSPACED = f"{CHINESE}{THAI}\u1000-\u103f\u1050-\u109f\u1780-\u17d3\u17d7\u17dc\u1950-\u1974\u1980-\u19c9"
UNSPACED += "\u1a20-\u1a7c\ua9e0-\ua9ef\ua9fa-\ua9fe\uaa60-\uaa7f\uaa80-\uaac2"
KATAKANA = "\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # a run of them is one word
# Marks between words of Tibetan and Ethiopic, and the blank without width that some write in Khmer and Thai.
DIVIDERS = "\u0f0b\u0f0c\u1361\u200b"
# Marks inside words: joiners of Persian and Hindi, then those of Armenian and Hebrew.
JOINERS = "\u200c\u200d\u055a-\u055c\u055e\u05f3\u05f4"
# Characters without width that words are read without: soft hyphens, directions of writing, and joiners.
INVISIBLE = r"[\x{AD}\x{61C}\x{200E}\x{200F}\x{202A}-\x{202E}\x{2060}-\x{2064}\x{2066}-\x{2069}\x{FEFF}]"
OPTIONS = (
    "pad_token", "unk_token", "bos_token", "eos_token", "cls_token", "sep_token", "mask_token", "truncation_side",
    "model_max_length",
)  # fmt: skip
"""Settings of a tokenizer that transformers stores in `CONFIG`, and not in tokenizer.json."""
CONFIG = "tokenizer_config.json"
PROMPT = "dipole_prompt"  # key of CONFIG for the text to put before every sentence
VECTORS = (
    "Give text (also .gz), a word and its numbers on each line, divided by blanks. gensim makes it of a binary file: "
    "KeyedVectors.load_word2vec_format(FILE, binary=True).save_word2vec_format(NEW)."
)
EMPTY = -1  # number of a sentence without words


def _words_pattern(word: str, alone: str, dividers: str = "") -> str:
    """Cut words as the Penn Treebank does where that matters for a bag of words.

    Contractions are cut, numbers and hyphenated words are not, and every other mark is a word. Text that is already
    cut this way (SentEval's files) stays as it is.
    """
    return (
        rf"{word}(?=n['’]t\b)|n['’]t\b|['’](?:s|re|ve|ll|d|m|S|RE|VE|LL|D|M)\b"
        rf"|{alone}{word}(?:[-.,/]{word})*|\.{{2,}}|-{{2,}}|``|''|[^\w\s{dividers}]"
    )


PATTERN = _words_pattern(r"\w+", "")
"""Words of scripts that put blanks between them. Vocabularies of such words alone have it, in earlier runs too."""
_WORD = rf"[^\W{UNSPACED}{KATAKANA}]+"
ANY_SCRIPT = _words_pattern(
    rf"{_WORD}(?:[{JOINERS}]{_WORD})*", rf"[{KATAKANA}]+|[{UNSPACED}]\p{{M}}*|", DIVIDERS + JOINERS
)
_OTHER_SCRIPT = re.compile(f"[{UNSPACED}{KATAKANA}{JOINERS}]")


def _configure(tokenizer: Tokenizer, lower: bool, pattern: str = ANY_SCRIPT) -> Tokenizer:
    # An empty sentence is read as a full stop, as in SentEval's examples.
    parts = [normalizers.Replace(Regex(INVISIBLE), ""), normalizers.NFC(), normalizers.Replace(Regex(r"^\s*$"), ".")]
    if lower:
        parts.append(normalizers.Lowercase())
    tokenizer.normalizer = normalizers.Sequence(parts)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="removed", invert=True)
    return tokenizer


def counted_vocabulary(counts: Iterable[tuple[str, int]], size: int, lower: bool = False) -> "Tokens":
    """Take the `size` most frequent words, id 0 for every other. Ties are broken by alphabetical order."""
    counted = [(-count, word) for word, count in counts]
    pattern = _pattern_of(word for _, word in counted)
    tokens = words_vocabulary([word for _, word in heapq.nsmallest(size, counted)], lower, pattern)
    tokens.tokenizer.add_special_tokens([UNKNOWN])  # as the library's trainer does
    return tokens


@cache
def word_cutter(lower: bool = False) -> Callable[[str], list[str]]:
    tokenizer = _configure(Tokenizer(WordLevel({UNKNOWN: 0}, unk_token=UNKNOWN)), lower)
    normal, pre = tokenizer.normalizer, tokenizer.pre_tokenizer

    def cut(sentence: str) -> list[str]:
        words = []
        for number, part in enumerate(sentence.split(UNKNOWN)):  # the tokenizer reads "<unk>" as one token
            if number:
                words.append(UNKNOWN)
            if part or part == sentence:
                words += [word for word, _ in pre.pre_tokenize_str(normal.normalize_str(part))]
        return words

    return cut


def _pattern_of(words: Iterable[str]) -> str:
    return ANY_SCRIPT if any(map(_OTHER_SCRIPT.search, words)) else PATTERN


def words_vocabulary(words: Sequence[str], lower: bool = False, pattern: str | None = None) -> "Tokens":
    """Make a vocabulary of the given words, ids from 1 in their order (0 is every other word)."""
    index = {word: number for number, word in enumerate(dict.fromkeys([UNKNOWN, *words]))}
    return Tokens(_configure(Tokenizer(WordLevel(index, unk_token=UNKNOWN)), lower, pattern or _pattern_of(words)))


def load_tokens(source: str | Path) -> "Tokens":
    """Load a Hugging Face tokenizer: a tokenizer.json, a folder that holds one, or a name on the Hub."""
    path = Path(source)
    inner = path / "tokenizer.json"
    try:
        if path.is_dir() and inner.is_file():
            if (path / CONFIG).is_file():  # it can change what tokenizer.json says, such as lower-casing
                with suppress(Exception):  # a class that is not installed, or whose code lies in the folder
                    return _as_transformers(source)
            path = inner
        if path.is_file():
            return Tokens(Tokenizer.from_file(str(path)), _options_beside(path))
        return _as_transformers(source)
    except Exception as error:  # the tokenizers library raises bare Exception
        why = str(error).splitlines()[0].rstrip(".")
        raise DataError(
            f"no tokenizer at {source}: {why}. Give a tokenizer.json, a folder that holds one, a name on the Hugging "
            f"Face Hub, or 'words'."
        ) from error


def _as_transformers(source: str | Path) -> "Tokens":
    from transformers import AutoTokenizer

    from dipole.core.utils.backbone import without_transformers_output

    with without_transformers_output():
        loaded: Any = AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)
    inner = getattr(loaded, "_tokenizer", None)
    if not isinstance(inner, Tokenizer):
        raise ValueError(f"{type(loaded).__name__} is written in Python, and one of the tokenizers library is needed")
    told = {name: getattr(loaded, name, None) for name in OPTIONS}
    return Tokens(inner, {name: value for name, value in told.items() if value is not None})


def copied(tokenizer: Tokenizer, first: Any = None) -> Tokenizer:
    """Copy a tokenizer. A normalizer `first` comes before its own."""
    found = Tokenizer.from_str(tokenizer.to_str())
    if first is not None:
        found.normalizer = first if found.normalizer is None else normalizers.Sequence([first, found.normalizer])
    return found


def _options_beside(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in map(path.with_name, ("special_tokens_map.json", CONFIG)):
        if file.is_file():
            found |= read_json(file)
    # A token can stand there with its settings.
    told = {name: each.get("content") if isinstance(each, dict) else each for name, each in found.items()}
    return {name: told[name] for name in OPTIONS if told.get(name) is not None}


class Tokens:
    """A tokenizer of the tokenizers library and its vocabulary. Its padding and truncation are switched off.

    `options` are what transformers stores with it (`OPTIONS`), for exports. `truncation_side` also holds here.
    `prompts` are texts by name, as in sentence-transformers. `encode` puts the default one before every sentence.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: Mapping[str, Any] | None = None,
        prompts: Mapping[str, str] | None = None,
        default_prompt: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.options = dict(options or {})
        self.prompts, self.default_prompt = dict(prompts or {}), default_prompt
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.index = tokenizer.get_vocab()
        self.words_only = isinstance(tokenizer.model, WordLevel)
        # An empty sentence is read as a full stop, as in SentEval's examples.
        self.empty = self.index.get(".", self.index.get(UNKNOWN, self.index.get("[UNK]", 0)))

    def __len__(self) -> int:
        return max(self.index.values()) + 1

    def encode(self, sentences: Sequence[str], max_length: int | None = None) -> list[list[int]]:
        """Return the ids of every sentence, at most `max_length` with special tokens. An empty one is a full stop."""
        special = self.tokenizer.num_special_tokens_to_add(False)
        if max_length is not None:
            if max_length <= special:
                raise ConfigError(
                    f"text.max_length {max_length} leaves no token of a sentence: the tokenizer adds {special} special "
                    f"tokens. Set it to {special + 1} or more."
                )
            self.tokenizer.enable_truncation(max_length, direction=self.options.get("truncation_side", "right"))
        try:
            found = self.tokenizer.encode_batch_fast([self.prompt + sentence for sentence in sentences])
        finally:
            self.tokenizer.no_truncation()
        return [encoding.ids or [self.empty] for encoding in found]

    @property
    def prompt(self) -> str:
        """Text that `encode` puts before every sentence."""
        return self.prompts.get(self.default_prompt or "", "")

    @property
    def unknown(self) -> int | None:
        """Return the id of unknown words, or None if every text can be spelled."""
        model: Any = self.tokenizer.model
        name = getattr(model, "unk_token", None)
        return getattr(model, "unk_id", None) if name is None else self.index.get(name)

    def words(self) -> list[str]:
        by_id = {number: word for word, number in self.index.items()}
        return [by_id.get(number, "") for number in range(len(self))]

    @property
    def fingerprint(self) -> str:
        """Content hash. Without the removal of `INVISIBLE`, which few texts hold, it is that of earlier runs."""
        removal = json.dumps({"type": "Replace", "pattern": {"Regex": INVISIBLE}, "content": ""}, separators=(",", ":"))
        content = self.tokenizer.to_str().replace(f"{removal},", "") + self.prompt
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Write a tokenizer.json, and its options next to it."""
        self.tokenizer.save(str(path))
        if self.options:
            path.with_name(CONFIG).write_text(json.dumps(self.options, indent=1) + "\n", encoding="utf-8")


def read_vectors(path: str | Path, wanted: Container[str] | None = None) -> tuple[list[str], np.ndarray]:
    """Read words, only those `wanted`, and vectors (n, width) in float32 from a text file of GloVe or word2vec."""
    found: dict[str, np.ndarray] = {}
    width = 0
    try:
        with io.TextIOWrapper(open_bytes(Path(path)), "utf-8-sig", errors="replace", newline="\n") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                first, *numbers = line.rstrip().split(" ")
                if number == 1 and len(numbers) == 1 and first.isdecimal() and numbers[0].isdecimal():
                    width = int(numbers[0])
                    continue
                width = width or len(numbers)
                if not numbers or len(numbers) < width:
                    problem = f"{len(numbers)} numbers after the word, expected {width}"
                    raise DataError(f"{path}, line {number}: {problem}. {VECTORS}")
                word = " ".join([first, *numbers[:-width]])  # GloVe 840B has a few words with blanks
                if word in found or (wanted is not None and word not in wanted):
                    continue
                with suppress(ValueError):
                    found[word] = np.array(numbers[-width:], dtype=np.float32)
                if word not in found or not np.isfinite(found[word]).all():
                    problem = f"the vector of {word[:40]!r} holds something else than finite numbers"
                    raise DataError(f"{path}, line {number}: {problem}. {VECTORS}")
    except DAMAGED as error:
        raise DataError(f"word vectors {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not found and wanted is None:
        raise DataError(f"{path} holds no word vectors. {VECTORS}")
    return list(found), np.array([*found.values()], dtype=np.float32).reshape(len(found), width)


def expand(
    index: dict[str, int], table: np.ndarray, vector_words: Sequence[str], vectors: np.ndarray
) -> tuple[list[str], np.ndarray]:
    """Map vectors of new words into a trained table (V, d) (Kiros et al. 2015, Sec. 2.2, and the Quick-Thought code).

    The map is linear with intercept, fitted by least squares on shared words, whose rows `index` has. Words with an
    underscore (phrases of word2vec) are skipped. Return the added words and their embeddings (k, d).
    """
    shared = [i for i, word in enumerate(vector_words) if index.get(word, 0)]
    if not shared:
        raise DataError("expansion of the vocabulary: no word of the vector file is in the trained vocabulary")
    design = np.concatenate([vectors[shared], np.ones((len(shared), 1), dtype=vectors.dtype)], 1).astype(np.float64)
    target = table[[index[vector_words[i]] for i in shared]].astype(np.float64)
    solution, *_ = np.linalg.lstsq(design, target, rcond=None)
    new = [i for i, word in enumerate(vector_words) if word not in index and "_" not in word]
    mapped = vectors[new].astype(np.float64) @ solution[:-1] + solution[-1]
    return [vector_words[i] for i in new], mapped.astype(table.dtype)


def number_words(sentences: Sequence[str], lower: bool) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return numbers (T,) of words in order of occurrence (EMPTY: none), lengths (n,) of sentences, and the words."""
    cut = word_cutter(lower)
    index: dict[str, int] = {}
    seen: dict[str, list[int]] = {}  # texts without a blank, most of which repeat
    numbers, lengths = array("i"), array("i")

    def numbered(words: Iterable[str]) -> list[int]:
        return [index.setdefault(word, len(index)) for word in words]

    for sentence in sentences:
        parts = [sentence] if UNKNOWN in sentence else sentence.split(" ")  # no word holds a blank
        found: list[int] = []
        for part in parts:
            if part not in seen:
                words = cut(part)
                if words == ["."] and "." not in part:  # a part is no empty sentence
                    words = []
                seen[part] = numbered(words)
            found += seen[part]
        found = found or numbered(cut(sentence)) or [EMPTY]
        numbers.extend(found)
        lengths.append(len(found))
    return np.array(numbers, np.int32), np.array(lengths, np.int32), list(index)
