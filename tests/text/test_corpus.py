"""Reading corpora: documents, formats, encodings and scripts. Damaged and unsupported files are refused by name."""

import bz2
import gzip
import json
import lzma
import random
import re
import warnings
from itertools import pairwise

import datasets
import pyarrow
import pytest
import regex
import torch

from dipole.core.utils.errors import DataError
from dipole.text import corpus as reading
from dipole.text import splitting
from dipole.text.corpus import Document, documents_of, pydoc_documents, read_pieces, split_sentences
from dipole.text.embed import sentence_embedder
from dipole.text.vocabulary import PATTERN, counted_vocabulary, number_words, word_cutter, words_vocabulary
from tests.runs import refused
from tests.systems import links
from tests.text.made import text_adapter, text_of, write_rows

TEXT = "One here. Two there.\nThree caf\u00e9 now."


def documents(source, **options):
    return list(documents_of(read_pieces(str(source), **options)))


def test_text_is_split_into_sentences_and_topics():
    text = 'Mr. Smith went to St. Ives. "Did he?" she asked. He\ndid!\n\nA new paragraph, e.g. this one'
    assert split_sentences(text) == [
        "Mr. Smith went to St. Ives.", '"Did he?" she asked.', "He did!", "A new paragraph, e.g. this one"
    ]  # fmt: skip
    assert split_sentences(" \n\n ") == []
    line = "word " * 200_000 + "end. Next one."
    found = split_sentences(line)
    assert sum(len(s.split()) for s in found) == 200_003
    assert found[-1] == "Next one."
    topics = list(pydoc_documents())
    assert len(topics) > 50
    sentences = [sentence for topic in topics for sentence in topic.sentences]
    assert len(sentences) > 2500
    assert not any("::=" in sentence or ">>>" in sentence for sentence in sentences)
    assert [topic.name for topic in topics] == [topic.name for topic in pydoc_documents()]


def test_sentences_equal_punkt():
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    punkt = PunktSentenceTokenizer(splitting.punkt()._params)
    parts = ["Mr", "word", "It", "U.S", "e.g", "Yes", "end", "3", "x-Dr", "it's", "\u00e9t\u00e9", "At"]
    parts += [*"...!?", " ", " "]
    parts += [". ", "! ", "? ", ".. ", "... ", '"', "'", "(", ")", "\u201d", " -- ", ",", ";", ": ", ". . . ", "[1"]
    rng = random.Random(0)
    texts = (" ".join("".join(rng.choices(parts, k=rng.randint(1, 25))).split()) for _ in range(1000))
    for text in (text for text in texts if not splitting.FINAL.search(text)):
        ends = [0]
        for start, end in punkt.span_tokenize(text):  # without its ends behind a number, before marks, and in words
            is_inside = text[start - 1] != " " and text[start] not in "[("
            number = re.fullmatch(r" ?\d\.", text[ends[-2:][0] : ends[-1]])
            words = text[start:].lstrip("- ")
            ending = "([.?!]['\")\u201d]+|\\w [A-Z]\\w*!) $" + "|[?!] $" * text.startswith("--", start)
            goes_on = words[:1].islower() and re.search(ending, text[:start])
            if ends[1:] and (is_inside or number or goes_on or not re.search(r"\w", text[start:end])):
                ends.pop()
            ends.append(end)
        assert split_sentences(text) == [text[a:b].strip() for a, b in pairwise(ends)], text


@pytest.mark.parametrize("alphabet", ["ab. \n", " \n", "a.\n\n b", "aaaaaaaab ", "a\t\x0b. \n\u2028"])
def test_a_stream_gives_the_sentences_of_the_text(monkeypatch, tmp_path, alphabet):
    draw = random.Random(alphabet)
    monkeypatch.setattr(splitting, "LONGEST_PARAGRAPH", 40)
    file = tmp_path / "a.txt"
    for _ in range(100):
        monkeypatch.setattr(reading, "PIECE", draw.choice([1, 5, 30, 80, 200]))
        text = "".join(draw.choice(alphabet) for _ in range(draw.randrange(400)))
        file.write_text(text, encoding="utf-8", newline="")
        pieces = list(reading.file_pieces(file, "documents", None, "utf-8"))
        assert [s for piece in pieces for s in split_sentences(piece.text)] == split_sentences(text)


def test_files_are_documents(tmp_path):
    with gzip.open(tmp_path / "b.TXT.GZ", "wt") as file:
        file.write("One. Two.")
    (tmp_path / "a.txt").write_text("Three.\n\nFour.")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "cover.png").write_bytes(b"\x89PNG")
    (tmp_path / ".git").mkdir()
    write_rows(tmp_path / ".git" / "a.jsonl", [{"text": "No."}])
    empty, other = (pytest.warns(UserWarning, match=each) for each in (r"empty\.txt", r"skipped \(\.png\)"))
    with empty, other:
        found = documents(tmp_path)
    assert found == [Document("a", ["Three.", "Four."]), Document("b", ["One.", "Two."])]
    assert next(documents_of(read_pieces(str(tmp_path / "a.txt"), unit="sentences"))).sentences == ["Three.", "Four."]


@links
def test_broken_links_are_skipped_with_a_warning(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").symlink_to(tmp_path / "b.txt")
    (tmp_path / "c.txt").symlink_to(tmp_path / "missing.txt")
    (tmp_path / "round").symlink_to(tmp_path)
    with pytest.warns(UserWarning, match=r"b\.txt is a broken link and is skipped \(2 broken links"):
        assert len(documents(tmp_path)) == 1


def test_rows_of_files_of_parquet_and_of_datasets_are_documents(tmp_path):
    rows = [{"id": "x", "sentences": ["One .", None, "Two ."]}, {"id": "y", "text": "Three. Four."}]
    write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / "packed.JSONL.GZ").write_bytes(gzip.compress((tmp_path / "rows.jsonl").read_bytes()))
    expected = [Document("x", ["One .", "Two ."]), Document("y", ["Three.", "Four."])]
    for name in ("rows.jsonl", "packed.JSONL.GZ"):
        assert documents(tmp_path / name) == expected
    assert list(documents_of(read_pieces(rows))) == expected
    assert next(documents_of(read_pieces(["One.", "Two."], unit="sentences"))).sentences == ["One.", "Two."]
    table = datasets.Dataset.from_dict({"text": ["One. Two.", None, "Three."]})
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    table.to_parquet(tmp_path / "set/test.parquet")
    for source in (f"{tmp_path}/rows.parquet", f"{tmp_path}/saved", f"hub:{tmp_path}/set"):  # the last is streamed
        found = documents_of(read_pieces(source, split="test" if "hub" in source else "train"))
        assert [document.sentences for document in found] == [["One.", "Two."], [], ["Three."]]
    table.to_parquet(tmp_path / "set/train/rows.parquet")
    (tmp_path / "set/dataset_infos.json").write_text('{"default": {"features": {}}}')  # of the Hub
    with pytest.warns(UserWarning, match="every file is read, those called test too. .* or hub:.*set"):
        assert len(documents(tmp_path / "set")) == 6


def test_lines_of_a_file_are_sentences_but_very_long_ones_and_control_characters_are_read(tmp_path, monkeypatch):
    (tmp_path / "b.txt").write_bytes(b"A b c. " * 20_000 + b"\x00\x01 the end.")
    assert list(read_pieces(str(tmp_path / "b.txt")))
    (tmp_path / "a.txt").write_text("word " * 500_000)
    assert list(read_pieces(str(tmp_path / "a.txt")))
    monkeypatch.setattr(reading, "LONGEST_LINE", 1_000_000)
    refused(DataError, "a line of more than 1,000,000 char", documents, tmp_path / "a.txt", unit="sentences")
    monkeypatch.setattr(reading, "PIECE", 50)
    (tmp_path / "0.txt").write_text(text_of(0, 3000), encoding="utf-8")
    (document,) = documents_of(read_pieces(str(tmp_path / "0.txt"), unit="sentences"))
    lines = (tmp_path / "0.txt").read_text("utf-8").split("\n")
    assert document.sentences == [" ".join(line.split()) for line in lines if line.strip()]


PACK = {
    "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".XZ": lzma.compress,
    ".zst": lambda data: pyarrow.compress(data[:9], "zstd", True) + pyarrow.compress(data[9:], "zstd", True),  # two
}  # fmt: skip


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize(("name", "text", "column"), [
    ("a.csv", 'id,text\n1,"One. Two, with a comma."\n2,Three.\n', None),
    ("A.Tsv", "id\ttext\n1\tOne. Two, with a comma.\n2\tThree.\n", None),
    ("A.CSV", 'stars,review\n1,"One. Two, with a comma."\n2,Three.\n', None),
    ("a.csv", 'review\n"One. Two, with a comma."\nThree.\n', None),
    ("a.csv", 'sep=,\nreview\n"One. Two, with a comma."\nThree.\n', None),  # as Excel writes it
    ("a.csv", 'title,review,,\nA,"One. Two, with a comma.",,\nB,Three.,,\n', "review"),
    ("a.csv", 'n,review\n1,\n2,7\n3,"One. Two, with a comma."\n4,Three.\n', None),  # below empty cells
])  # fmt: skip
def test_tables_have_a_column_of_text(tmp_path, name, text, column, packed):
    path = tmp_path / (name + packed)
    path.write_bytes(PACK[packed](text.encode()))
    found = [document.sentences for document in documents_of(read_pieces(str(tmp_path), column=column))]
    assert found[-2:] == [["One.", "Two, with a comma."], ["Three."]]
    assert found[:-2] in ([], [[], ["7"]])


@pytest.mark.parametrize(("name", "content", "message"), [
    ("latin.txt", "caf\xe9 noir".encode("latin-1"), r"latin\.txt is not utf-8: byte 3 is 0xe9"),
    ("a.txt", "caf\u00e9 ".encode() * 50_000 + b"\xe9 noir", "byte 300000 is 0xe9"),
    ("empty.txt", b"", r"empty\.txt is empty"),
    ("blank.txt", b" \n\n\t\n", r"blank\.txt is empty: it holds no sentence"),
    ("cut.jsonl", b'{"text": "a"}\n{"text": "b', r"cut\.jsonl, line 2: not JSON"),
    ("other.jsonl", b'{"titel": "a"}', r"other\.jsonl, line 1: no column 'text'; it has titel"),
    ("number.jsonl", b'{"text": 3}', r"number\.jsonl, line 1: column 'text' holds int"),
    ("bad.jsonl.gz", bytes([*gzip.compress(b"x", mtime=0)[:10], 255, 255, 0, 0]), r"bad\.jsonl\.gz, after line 0"),
    ("cut.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 500, mtime=0)[:-20], r"cut\.jsonl\.gz"),
    ("cut.csv.xz", lzma.compress(b"text\n" + b"A b.\n" * 500)[:-20], r"cut\.csv\.xz cannot be read"),
    ("a.jsonl.xz", b'{"text": "a"}\n', r"a\.jsonl\.xz, after line 0: Input format not supported"),
    ("a.txt.zst", b"One.", r"a\.txt\.zst cannot be read: ZSTD"),
    ("a.jsonl", b'{"text": "A b. C d."}\n{"text": "half \\ud83d"}\n', r"line 2: half a surrogate pair is no text"),
    ("a.csv", b"text;label\nA b. C d.;1\n", r"line 1: one column, 'text;label': .* divided by ';'"),
    ("a.csv", b"sep=;\ntext;label\nA b. C d.;1\n", r"line 1: one column, 'sep=;': .* divided by ';'"),
    ("a.tsv", b"text,label\nA b. C d.,1\n", r"line 1: one column, 'text,label': .* divided by ','"),
    ("bad.parquet", b"no parquet at all", r"bad\.parquet"),
    (None, None, "no corpus at"), ("folder/a.png", b"", r"holds no \.txt"),
])  # fmt: skip
def test_damaged_and_missing_files_are_refused(tmp_path, name, content, message):
    path = tmp_path / (name or "absent")
    if name:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    refused(DataError, message, documents, path.parent if path.parent != tmp_path else path)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.csv", b"title,review\nOne,Two\n", r"line 2: several columns .* text: title, review.*text\.column"),
    ("a.csv", b"a,b\n1,2\n", r"no column holds text \(the file has a, b\)\. Set text\.column"),
    ("a.zip", b"PK\x03\x04 ...", r"a\.zip is not read as text: .*unpack archives such as .zip"),
    ("corpus", b"One. Two.", "not read as text"),
    ("a.tar.gz", gzip.compress(b"One.", mtime=0), "not read as text"),
    ("a.txt", gzip.compress(b"One. Two.", mtime=0), r"a\.txt holds no text: it is a gzip file"),
    ("a.txt", b"PK\x03\x04" + bytes(range(256)), "it is a zip archive"),
    ("a.txt", b"\x89PNG\r\n\x1a\n" + bytes(50), "it is an image"),
    ("a.txt", random.Random(0).randbytes(3000), "it is binary data"),
    ("a.txt.gz", gzip.compress(random.Random(0).randbytes(3000), mtime=0), "it is binary data"),
    ("a.txt", b"A b c. " * 20_000 + random.Random(0).randbytes(1 << 17), "binary data|not utf-8"),
    *((name, b"PAR1" + bytes(range(1, 256)) * 4, "it is a parquet file") for name in ("a.csv", "a.tsv", "a.txt")),
    ("a.txt.gz", b"One. Two.", "cannot be read: Not a gzipped file"),
    ("a.txt.gz", gzip.compress(b"One. Two." * 99, mtime=0)[:-9], "cannot be read"),
])  # fmt: skip
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_files_that_are_no_text_are_refused(tmp_path, name, content, message, encoding):
    (tmp_path / name).write_bytes(content)
    refused(DataError, message, documents, tmp_path / name, encoding=encoding)


@pytest.mark.parametrize(("name", "content", "encoding"), [
    ("a.txt", "One.\r\nTwo. Caf\u00e9.".encode("latin-1"), "latin-1"),
    ("a.txt", "\ufeffOne.\nTwo. Caf\u00e9.".encode(), "utf-8"),
    ("a.txt.gz", gzip.compress("\ufeffOne.\r\nTwo. Caf\u00e9.".encode(), mtime=0), "utf-8"),
])  # fmt: skip
def test_reads_encodings_marks_and_packed_text(tmp_path, name, content, encoding):
    (tmp_path / name).write_bytes(content)
    found = next(documents_of(read_pieces(str(tmp_path / name), encoding=encoding)))
    assert found.sentences == ["One.", "Two.", "Caf\u00e9."]


@pytest.mark.parametrize("codec", ["utf-16", "utf-32"])
@pytest.mark.parametrize(("name", "start"), [("a.txt", ""), ("a.csv", "text\n"), ("a.txt.gz", "")])
def test_recognises_wide_encodings_by_their_mark(tmp_path, codec, name, start):
    path = tmp_path / name
    data = (start + TEXT.replace("\n", " ")).encode(codec)
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    refused(DataError, f"Set text.encoding = '{codec}'", documents, path)
    assert documents(path, encoding=codec)[0].sentences == ["One here.", "Two there.", "Three caf\u00e9 now."]
    path.write_bytes(gzip.compress(b"text\nA b.") if name.endswith(".gz") else b"text\nA b.")
    refused(DataError, f"not {codec}", documents, path, encoding=codec)


SENTENCES = {
    "Chinese": ["“你好。”", "他说完就走了！", "真的？！", "是的……版本３．５不错．", "好!", "走吧."],
    "Japanese": ["今日は晴れです。", "「はい。」", "コンピューターを買う｡"],
    "Hindi": ["वह घर गया।", "क्या वह हिन्दी बोलता है?", "हाँ॥"],
    "Arabic": ["ذهب الولد إلى البيت.", "هل أكل؟", "نعم!"],
    "Urdu": ["یہ گھر ہے۔", "کیا؟", "ہاں۔"],
    "Armenian": ["Բարև։", "Ինչպե՞ս ես։"], "Amharic": ["ሰላም።", "እንዴት ነህ፧", "ደህና፡፡"],
    "Khmer": ["ខ្ញុំទៅសាលា។", "គាត់មក៕"], "Burmese": ["သူသွား၏။", "သူပြန်လာ၏။"],
    "Tibetan": ["བོད་སྐད་ཡིན།", "ངས་ཤེས།"], "Greek": ["Πώς είσαι;", "Καλά είμαι."],
    "Thai": ["วันนี้อากาศดี", "ผมไปตลาดวันที่ 5 มกราคม"], "Russian": ["Это первое.", "Да?"],
    "Korean": ["안녕하세요.", "저는 학생입니다."],
}  # fmt: skip
UNSPACED = ("Chinese", "Japanese", "Khmer", "Thai", "Burmese")


@pytest.mark.parametrize("script", SENTENCES)
def test_sentences(script):  # the last two in Chinese end in ASCII marks
    blank = "" if script in ("Chinese", "Japanese", "Burmese") else " "
    assert split_sentences(blank.join(SENTENCES[script])) == SENTENCES[script]


@pytest.mark.parametrize(("blank", "wanted"), [
    (" ", ["He has a Ph.D. from M.I.T. in it.", "Das ist d.h. so.", "Он дома и т.ч. тут.", "The U.N. met?"]),
    (" ", ["Am 3. Mai im 19. Jahrhundert.", "I am 30.", "It is.", "Il part.", "« Oui ! »", "Il dit : « Non. »"]),
    (" ", ["הוא הלך.\u200f", "ذهب الولد؟\u200f", "\u200fالولد!\u200f", "He came.\u2060", "v.\u200e 2"]),
    ("", ["我用Python.", "很好用.", "你呢?", "Yes, 我用2.0版!", "テスト.", "コンピュータ."]),
    (" ", ["सर्दी है |", "तुम कहाँ हो |", "आमि |", "ठीक a|b"]),
    (" ", ["သူ၊ မောင်မောင်၊ သွားမယ်။", "ကောင်းတယ်။", "ទឹក។ល។", "ចប់។"]),
    (" ", ["Հայաստանը երկիր է:", "«Երեւանը քաղաք է:»", "«Πού πας;»", "Εκείνη έφυγε."]),
    (" ", ["እኔ ነኝ::", "አንተስ?", "እሺ::"]), (" ", ["བོད་ཡིག་ནི། །", "བོད་ཀྱི་ཡིག །"]),
    (" ", ["เกิดพ.ศ.๒๕๔๐ที่กรุงเทพฯ", "เด็ก ๆ ไปโรงเรียน", "ปลา ฯลฯ"]),
    (" ", ["“안녕하세요.”라고 말했다.", "„Komm!“, sagte er.", "Great!😀", "He said no.", "See No. 5, p. 5.", "Ok!!"]),
    (" ", ["“Who?” he said.", "« Non ? » dit-il.", "»Ja?« rief er.", "—¿Sí? —dijo.", "«Τι;» είπε.", "(Why?) so."]),
    (" ", ["He left.[12]", "Then she came.[3][a]", "It is so \ue000 (see Fig. 4.)", "[1] is it.", "No.*", "I am.[12]"]),
    (" ", ["**Note!**", "It *is.*", "*Why?* he said.", '"Go!"', '"No."', '"Is it?"', "iPhones are.", "- so"]),
    (" ", ["डॉ. शर्मा आए।", "रु. 500 दिए।", "د. أحمد هنا.", "א. ב. יהושע כתב.", "1. Das ist ca. 3 km bzw. mehr."]),
    (" ", ["The Jeopardy! host met.", "The Ph.D. Students left the U.S.", "As did Mr. So, 5 p.m.", "He met Dr. He."]),
    (" ", ["Yahoo! Inc. did.", "The U.N. Council met.", "In the E.U.", "It is.", "Am 3. 5. 2020.", "I am 3.", "5 go."]),
    (" ", ["“네.” 라고 말했다.", '"정말?" 하고 물었다.', '"네."', "하고 싶은 말이 있다.", '"No U.S."', "Oh!", "so."]),
    ("", ["彼は「はい。」と言った。", "我去U.S.A.了。", "真的吗?!", "你好！😀", "好。", "¿Qué?", "¡No!"]),
    ("\n", ["Items:", "- one", "• two", "1. three", "2) four"]),
])  # fmt: skip
def test_marks_as_people_type_them(blank, wanted):
    """ASCII marks in place of a script's own, abbreviations, and blanks that end no sentence."""
    assert split_sentences(blank.join(wanted)) == wanted


def test_marks_joiners_and_greek_letters_are_those_of_unicode():
    """All Sentence_Terminal characters of scripts in use are known."""
    rare = regex.compile(r"[\p{Samaritan}\p{Coptic}\u2024\u2e2e\u2e3c\u2e53-\u2e61\uff0e.?!\u104a\ua9c8\u1b5e]")
    # \uff0e has another rule. The last three are commas.
    plane = "".join(chr(code) for code in range(0x10000) if not 0xD800 <= code < 0xE000)
    ends = regex.findall(r"\p{Sentence_Terminal}", plane)
    assert [mark for mark in ends if not rare.match(mark) and not re.match(f"[{splitting.MARKS}]", mark)] == []
    text = 'The angles α; β; and γ are small, i.e. below 1.5; the naïve "x" is not．'
    assert split_sentences(text) == [text]
    assert word_cutter()("می\u200cخواهم بروم") == ["می\u200cخواهم", "بروم"]
    assert word_cutter()("Ո՞վ է צה״ל ׳ צ׳ק") == ["Ո՞վ", "է", "צה״ל", "צ׳ק"]
    assert word_cutter()("ខ្ញុំ\u200bទៅ") == word_cutter()("ខ្ញុំ ទៅ")
    invisible = "\ufeffinter\u00adnational co\u2060operation\u200e"
    assert word_cutter()(invisible) == ["international", "cooperation"]
    assert words_vocabulary(["international", "cooperation"]).encode([invisible]) == [[1, 2]]


@pytest.mark.parametrize("script", SENTENCES)
def test_words_are_those_of_unicode(script):
    """Word boundaries of UAX 29, as the regex package has them. Marks between words are no words."""
    for sentence in " ".join(SENTENCES[script]).replace("３．５", "").split():  # one number there, and three words here
        for text in (sentence, f"{sentence} iPhone 3.5"):
            wanted = [word for word in regex.split(r"(?wV1)\b", text) if word.strip(" ་፡")]
            cut = word_cutter()(text)
            assert cut == wanted
            numbers, _, words = number_words([text], lower=False)
            assert [words[number] for number in numbers] == cut


def test_vocabularies_of_other_words_are_as_before():
    """The tokenizer of earlier runs, whose fingerprint is in their records."""
    latin = counted_vocabulary([("café", 2), ("Привет", 1), ("हिन्दी", 1)], 10)
    assert json.loads(latin.tokenizer.to_str())["pre_tokenizer"]["pattern"] == {"Regex": PATTERN}
    assert counted_vocabulary([("the", 2), ("你", 1)], 1).encode(["你好the"]) == [[0, 0, 1]]
    assert counted_vocabulary([("你", 1), ("好", 1)], 10).encode(["好你"]) != [[0, 0]]


@pytest.mark.parametrize("script", ["Chinese", "Hindi", "Arabic", "Thai", "Armenian"])
def test_an_encoder_tells_new_sentences_apart(tmp_path, script):
    """One paragraph of many sentences trains, and new sentences of its words have vectors of their own."""
    blank = "" if script in UNSPACED[:2] else " "
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n\n".join(blank.join(SENTENCES[script] * 3) for _ in range(3)), encoding="utf-8")
    with warnings.catch_warnings(action="error"):
        adapter = adapter_of(corpus, encoder="bow")
        assert len(adapter.sentences) >= 6 * len(SENTENCES[script])
        words = word_cutter()(" ".join(SENTENCES[script]))
        new = [f"{a} {b}" for a, b in pairwise(words[:5])]
        vectors = sentence_embedder(adapter.encoder()).vectors(new)
    assert len(torch.unique(vectors, dim=0)) == len(set(new))


def adapter_of(corpus, **settings):
    return text_adapter({"corpus": str(corpus), "held_out": 0, **settings}, 2, workdir=corpus.parent)


@pytest.mark.parametrize("unit", ["documents", "sentences"])
def test_warns_of_a_tokenizer_of_another_script_and_of_sentences_of_one_token(tmp_path, unit):
    counted_vocabulary([(word, 1) for word in ("an", "English", "text", ".")], 10).save(tmp_path / "tokenizer.json")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("Это первое. Это второе тут. Да?\nИ третье тоже.\n" * 2, encoding="utf-8")
    with pytest.warns(UserWarning, match="% of the words are unknown to the tokenizer"):
        adapter_of(corpus, unit=unit, encoder="bow", tokenizer=str(tmp_path / "tokenizer.json"))
    corpus.write_text("one\ntwo\nthree\nfour\n", encoding="utf-8")
    with pytest.warns(UserWarning, match=r"1\.0 tokens on average.*text.tokenizer"):
        adapter_of(corpus, unit="sentences", encoder="bow")


def test_warns_once_of_unknown_words_in_embed(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the cat sat here . the dog ran there .\n" * 4, encoding="utf-8")
    embedder = sentence_embedder(adapter_of(corpus, unit="sentences", encoder="bow").encoder())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        embedder.vectors(["the cat ran", "a dog", "", "here"])
        assert not said
        embedder.vectors(["你好", "第二句", "Привет мир", "नमस्ते"])
        embedder.vectors(["你好"])
    (only,) = said
    assert "100% of the words are unknown to the model. 4 of 4 sentences" in str(only.message)
