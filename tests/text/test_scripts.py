"""Text of other scripts: sentence marks, words without blanks between them, and warnings where words are unknown."""

import json
import re
import warnings
from itertools import pairwise

import pytest
import regex
import torch

from dipole.text.embed import SentenceEmbedder
from dipole.text.splitting import MARKS, split_sentences
from dipole.text.vocabulary import PATTERN, build_vocabulary, counted_vocabulary, number_words, word_cutter
from tests.text.made import text_adapter

SENTENCES = {
    "Chinese": ["“你好。”", "他说完就走了！", "真的？！", "是的……版本３．５不错．", "好!", "走吧."],
    "Japanese": ["今日は晴れです。", "「はい。」", "コンピューターを買う｡"],
    "Hindi": ["वह घर गया।", "क्या वह हिन्दी बोलता है?", "हाँ॥"],
    "Arabic": ["ذهب الولد إلى البيت.", "هل أكل؟", "نعم!"],
    "Urdu": ["یہ گھر ہے۔", "کیا؟", "ہاں۔"],
    "Armenian": ["Բարև։", "Ինչպե՞ս ես։"],
    "Amharic": ["ሰላም።", "እንዴት ነህ፧", "ደህና፡፡"],
    "Khmer": ["ខ្ញុំទៅសាលា។", "គាត់មក៕"],
    "Burmese": ["သူသွား၏။", "သူပြန်လာ၏။"],
    "Tibetan": ["བོད་སྐད་ཡིན།", "ངས་ཤེས།"],
    "Greek": ["Πώς είσαι;", "Καλά είμαι."],
    "Thai": ["วันนี้อากาศดี", "ผมไปตลาดวันที่ 5 มกราคม"],
    "Russian": ["Это первое.", "Да?"],
    "Korean": ["안녕하세요.", "저는 학생입니다."],
}
UNSPACED = ("Chinese", "Japanese", "Khmer", "Thai", "Burmese")


@pytest.mark.parametrize("script", SENTENCES)
def test_sentences(script):  # the last two in Chinese end in ASCII marks
    blank = "" if script in ("Chinese", "Japanese", "Burmese") else " "
    assert split_sentences(blank.join(SENTENCES[script])) == SENTENCES[script]


@pytest.mark.parametrize(
    ("blank", "wanted"),
    [
        (" ", ["He has a Ph.D. from M.I.T. in it.", "Das ist d.h. so.", "Он дома и т.ч. тут.", "The U.N. met?"]),
        ("", ["我用Python.", "很好用.", "你呢?", "Yes, 我用2.0版!", "テスト.", "コンピュータ."]),
        (" ", ["सर्दी है |", "तुम कहाँ हो |", "आमि |", "ठीक a|b"]),
        (" ", ["Հայաստանը երկիր է:", "Երեւանը քաղաք է:"]),
        (" ", ["እኔ ነኝ::", "አንተስ?", "እሺ::"]),
        (" ", ["བོད་ཡིག་ནི། །", "བོད་ཀྱི་ཡིག །"]),
        (" ", ["เกิดพ.ศ.๒๕๔๐ที่กรุงเทพฯ", "เด็ก ๆ ไปโรงเรียน", "ปลา ฯลฯ"]),
    ],
)
def test_marks_as_people_type_them(blank, wanted):
    """ASCII marks in place of a script's own, abbreviations, and blanks that end no sentence."""
    assert split_sentences(blank.join(wanted)) == wanted


def test_marks_joiners_and_greek_letters_are_those_of_unicode():
    """All Sentence_Terminal characters of scripts in use are known."""
    rare = regex.compile(r"[\p{Samaritan}\p{Coptic}\u2024\u2e2e\u2e3c\u2e53-\u2e61\uff0e.?!]")  # \uff0e: another rule
    plane = "".join(chr(code) for code in range(0x10000) if not 0xD800 <= code < 0xE000)
    ends = regex.findall(r"\p{Sentence_Terminal}", plane)
    assert [mark for mark in ends if not rare.match(mark) and not re.match(f"[{MARKS}]", mark)] == []
    text = 'The angles α; β; and γ are small, i.e. below 1.5; the naïve "x" is not．'
    assert split_sentences(text) == [text]
    assert word_cutter()("می\u200cخواهم بروم") == ["می\u200cخواهم", "بروم"]
    assert word_cutter()("ខ្ញុំ\u200bទៅ") == word_cutter()("ខ្ញុំ ទៅ")


@pytest.mark.parametrize("script", SENTENCES)
def test_words_are_those_of_unicode(script):
    """Word boundaries of UAX 29, as the regex package has them. Marks between words are no words."""
    for sentence in " ".join(SENTENCES[script]).replace("３．５", "").split():  # one number there, and three words here
        for text in (sentence, f"{sentence} iPhone 3.5"):
            wanted = [word for word in regex.split(r"(?wV1)\b", text) if word.strip(" ་፡")]
            cut = word_cutter()(text)
            assert [w for w in cut if w != "՞"] == wanted or script == "Armenian"
            numbers, _, words = number_words([text], lower=False)
            assert [words[number] for number in numbers] == cut


def test_vocabularies_of_other_words_are_as_before():
    """The tokenizer of earlier runs, whose fingerprint is in their records."""
    latin = counted_vocabulary([("café", 2), ("Привет", 1), ("हिन्दी", 1)], 10)
    assert json.loads(latin.tokenizer.to_str())["pre_tokenizer"]["pattern"] == {"Regex": PATTERN}
    chinese = counted_vocabulary([("the", 2), ("你", 1)], 1)
    assert chinese.encode(["你好the"]) == [[0, 0, 1]]
    assert build_vocabulary(["你好"]).encode(["好你"]) != [[0, 0]]


@pytest.mark.parametrize("script", ["Chinese", "Hindi", "Arabic", "Thai", "Armenian"])
def test_an_encoder_tells_new_sentences_apart(tmp_path, script):
    """One paragraph of many sentences trains, and new sentences of its words have vectors of their own."""
    blank = "" if script in UNSPACED[:2] else " "
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n\n".join(blank.join(SENTENCES[script] * 3) for _ in range(3)), encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter = adapter_of(corpus, encoder="bow")
        assert len(adapter.sentences) >= 6 * len(SENTENCES[script])
        words = word_cutter()(" ".join(SENTENCES[script]))
        new = [f"{a} {b}" for a, b in pairwise(words[:5])]
        vectors = SentenceEmbedder(adapter.encoder()).vectors(new)
    assert len(torch.unique(vectors, dim=0)) == len(set(new))


def adapter_of(corpus, **settings):
    return text_adapter({"corpus": str(corpus), "held_out": 0, **settings}, 2, workdir=corpus.parent)


def test_warns_of_sentences_of_one_token(tmp_path):
    corpus = tmp_path / "words.txt"
    corpus.write_text("one\ntwo\nthree\nfour\n", encoding="utf-8")
    with pytest.warns(UserWarning, match=r"1\.0 tokens on average.*text.tokenizer"):
        adapter_of(corpus, unit="sentences", encoder="bow")


@pytest.mark.parametrize("unit", ["documents", "sentences"])
def test_warns_of_a_tokenizer_of_another_script(tmp_path, unit):
    build_vocabulary(["an English text ."]).save(tmp_path / "tokenizer.json")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("Это первое. Это второе тут. Да?\nИ третье тоже.\n" * 2, encoding="utf-8")
    with pytest.warns(UserWarning, match="% of the words are unknown to the tokenizer"):
        adapter_of(corpus, unit=unit, encoder="bow", tokenizer=str(tmp_path / "tokenizer.json"))


def test_warns_of_unknown_words_in_embed(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the cat sat here . the dog ran there .\n" * 4, encoding="utf-8")
    embedder = SentenceEmbedder(adapter_of(corpus, unit="sentences", encoder="bow").encoder())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        embedder.vectors(["the cat ran", "a dog", "", "here"])
    with pytest.warns(UserWarning, match="100% of the words are unknown to the model. 4 of 4 sentences"):
        embedder.vectors(["你好", "第二句", "Привет мир", "नमस्ते"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        embedder.vectors(["你好"])  # said once
