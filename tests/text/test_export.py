"""Folders of sentence-transformers: as `text.transformer`, and as exports that libraries and MTEB load."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from importlib import import_module

import datasets
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn
from transformers import AutoTokenizer

from dipole.core.train.exports import public_name
from dipole.core.utils.errors import ConfigError, DataError, TrainingError
from dipole.text.config import TextSettings
from dipole.text.encode import SentenceEncoder
from dipole.text.encoders import networks as encoders
from dipole.text.encoders.batch import make_batch
from dipole.text.export import export_as
from dipole.text.export.sentence_transformers import export_sentence_transformer
from dipole.text.exported import open_folder
from dipole.text.model import build_model, small_transformer
from dipole.text.vocabulary import load_tokens
from tests.runs import Record, refused
from tests.text.made import CPU, text_adapter, write_rows
from tests.text.test_using import ENCODERS, SENTENCES, make_encoder
from tests.text.tiny_sentences import COLUMNS, tiny_model
from tests.without_dipole import WITHOUT_DIPOLE, run_here

TEXTS = COLUMNS["anchor"]
PAIRS = (TEXTS, COLUMNS["positive"])


def library_model(folder, tail, pooling="mean"):
    """Written into a folder, with these modules behind the pooling."""
    transformer = tiny_model(folder / "bare")[0]
    torch.manual_seed(1)
    model = SentenceTransformer(modules=[transformer, modules.Pooling(16, pooling_mode=pooling), *tail()], device="cpu")
    model.save_pretrained(str(folder / "model"), create_model_card=False)
    return model


def ours(folder, **settings):
    tokens = load_tokens(str(folder / "model" / "tokenizer.json"))
    settings |= {"corpus": "none", "encoder": "transformer", "tokenizer": "any", "sides": 1}
    config = TextSettings(transformer=str(folder / "model"), **settings)
    return build_model(config, len(tokens), None).eval(), tokens


TAILS = {
    "nothing": lambda: [], "dense": lambda: [modules.Dense(16, 6)],
    "dense without bias, normalised": lambda: [modules.Dense(16, 5, False, nn.Identity()), modules.Normalize()],
    "residual, layer norm": lambda: [modules.Dense(16, 6, True, nn.PReLU(), use_residual=True), modules.LayerNorm(6)],
    "dropout, normalised": lambda: [modules.Dropout(0.3), modules.Normalize()],
}  # fmt: skip


@pytest.mark.parametrize(("tail", "pooling"), [
    *((tail, "mean") for tail in TAILS), *(("nothing", each) for each in encoders.POOLING if each != "mean"),
    ("nothing", ["cls", "mean", "lasttoken"]),
])  # fmt: skip
def test_modules_and_pooling_stay(tmp_path, tail, pooling):
    wanted = library_model(tmp_path, TAILS[tail], pooling).encode(TEXTS, convert_to_tensor=True)
    model, tokens = ours(tmp_path)
    found = model.represent(make_batch([tokens.tokenizer.encode(text).ids for text in TEXTS], 3))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert model.width == wanted.shape[1]
    again = encoders.from_architecture(encoders.architecture(model))
    again.load_state_dict(model.state_dict())
    batch = make_batch([[2, 5, 3]])
    torch.testing.assert_close(again.eval().represent(batch), model.represent(batch))
    export_sentence_transformer(SentenceEncoder(model, tokens, "none", 32), tmp_path / "exported")
    exported = SentenceTransformer(str(tmp_path / "exported"), device="cpu")
    torch.testing.assert_close(exported.encode(TEXTS, convert_to_tensor=True), wanted, rtol=1e-5, atol=1e-5)


def frame_of(template):
    return processors.TemplateProcessing(single=template, special_tokens=[("[CLS]", 2), ("[SEP]", 3)])


def folder_of(tmp_path, name, text, *, limit=32, template="[CLS] $A [SEP]", lower=False, pooling="mean"):
    """A folder with prompts, a limit of length and another frame of special tokens, as its library writes it."""
    model = library_model(tmp_path, TAILS["nothing"], pooling)
    model.prompts, model.default_prompt_name, model.max_seq_length = {"query": text, "document": "a "}, name, limit
    model.similarity_fn_name = "dot"
    model.tokenizer.backend_tokenizer.post_processor = frame_of(template)
    model.tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    model.save_pretrained(str(tmp_path / "model"), create_model_card=False)
    if lower:  # as older folders write it
        again = json.loads((tmp_path / "model/tokenizer.json").read_text()) | {"normalizer": None}
        (tmp_path / "model/tokenizer.json").write_text(json.dumps(again))
        told = {"max_seq_length": limit, "do_lower_case": True}
        (tmp_path / "model/sentence_bert_config.json").write_text(json.dumps(told))
    return model


FOLDERS = {
    "default prompt": {"name": "query", "text": "the night "},
    "a special token in the prompt": {"name": "query", "text": "[SEP] the "},
    "prompts without default": {"name": None, "text": "the night "}, "short": {"name": None, "text": "", "limit": 6},
    "one leading token": {"name": None, "text": "", "limit": 6, "template": "[CLS] $A"},
    "two trailing tokens": {"name": "query", "text": "cat ", "limit": 7, "template": "[CLS] $A [SEP] [SEP]"},
    "lower case": {"name": "document", "text": "", "limit": 9, "lower": True},
}  # fmt: skip
LONG = ["the cat sat on a mat far home red blue green tree sky", "a", "Rain RAIN night", "", "a [SEP] cat", *TEXTS]


def adapter_of(tmp_path, **kept):
    """The adapter of a run on a table, which starts from the folder."""
    rows = [{"anchor": a, "positive": b} for a, b in zip(*PAIRS, strict=True)]
    folder = str(tmp_path / "model")
    settings = {"corpus": write_rows(tmp_path / "pairs.jsonl", rows), "pairs": "columns", "encoder": "transformer"}
    settings |= {"transformer": folder, "tokenizer": folder, "held_out": 0, "normalize": "none"}
    return text_adapter(settings, 2, workdir=tmp_path, **kept)


def assert_exported(tmp_path, adapter, library, to):
    (tmp_path / to).mkdir()
    adapter.export(to, tmp_path / to, Record())
    found = open_folder(tmp_path / to, CPU, None).vectors(LONG).numpy()
    assert found == pytest.approx(library.encode(LONG), abs=1e-5)
    if library.default_prompt_name:
        assert library.prompts[library.default_prompt_name] in (tmp_path / to / "tokenizer_config.json").read_text()


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * ("two" not in k)) for k in FOLDERS])
def test_onnx_keeps_prompts_and_limits_of_a_folder(tmp_path, kind):
    library = folder_of(tmp_path, **FOLDERS[kind], pooling=["max", "lasttoken"])
    assert_exported(tmp_path, adapter_of(tmp_path), library, "onnx")


@pytest.mark.parametrize("kind", FOLDERS)
def test_prompts_and_limits_of_a_folder(tmp_path, kind):
    """Vectors are the library's before and after training, in every export, which keeps prompts and the limit."""
    library = folder_of(tmp_path, **FOLDERS[kind])
    wanted = library.encode(LONG)
    adapter = adapter_of(tmp_path)
    anchors = adapter.data.sentences.ids(adapter.data.table.anchor)
    limit = FOLDERS[kind].get("limit", 32)
    trained = library.tokenizer([adapter.tokens.prompt + text for text in PAIRS[0]], truncation=True, max_length=50)
    assert [ids.tolist() for ids in anchors] == trained["input_ids"] or limit < 32
    assert adapter.encoder().encode(LONG) == pytest.approx(wanted, abs=1e-5)
    (tmp_path / "kept").mkdir()
    adapter.keep(tmp_path / "kept")
    again = adapter_of(tmp_path, kept=tmp_path / "kept")
    again.module.load_state_dict(adapter.module.state_dict())
    assert again.encoder().encode(LONG) == pytest.approx(wanted, abs=1e-5)
    export_sentence_transformer(again.encoder(), tmp_path / "exported")
    exported = SentenceTransformer(str(tmp_path / "exported"), device="cpu")
    assert exported.encode(LONG) == pytest.approx(wanted, abs=1e-5)
    assert exported.encode_document(LONG) == pytest.approx(library.encode_document(LONG), abs=1e-5)
    assert exported.max_seq_length == library.max_seq_length
    assert exported.similarity_fn_name == "dot"
    assert_exported(tmp_path, again, library, "transformers")


@pytest.mark.parametrize("template", ["[CLS] $A", "$A [SEP]", "[CLS] $A [SEP] [SEP]", "[CLS] [CLS] $A"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_tokens_are_cut_as_the_tokenizer_cuts_them(tmp_path, template, side):
    library_model(tmp_path, TAILS["nothing"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", truncation_side=side)
    tokenizer.backend_tokenizer.post_processor = frame_of(template)
    tokenizer.save_pretrained(tmp_path / "own")
    tokens = load_tokens(tmp_path / "own")
    for limit in range(template.count("[") + 1, 12):  # above the number of special tokens
        assert tokens.encode(LONG, limit) == tokenizer(LONG, truncation=True, max_length=limit)["input_ids"]
    tokens.save(tmp_path / "tokenizer.json")
    assert load_tokens(tmp_path / "tokenizer.json").encode(LONG, 5) == tokens.encode(LONG, 5)


@pytest.mark.parametrize("told", [{"do_lower_case": False}, {"strip_accents": False}, {"add_prefix_space": True}])
def test_settings_beside_a_tokenizer_hold_as_in_transformers(tmp_path, told):
    """Folders whose tokenizer_config.json says something else than their tokenizer.json."""
    kind = "GPT2" if "add_prefix_space" in told else "Bert"
    words = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "the", "cat", "The", "caf\u00e9", "cafe"]
    if kind == "GPT2":
        words = ["t", "c", "\u0120"]
        (tmp_path / "merges.txt").write_text("")
    index = {word: number for number, word in enumerate(words)}
    tokenizer = getattr(transformers, f"{kind}Tokenizer")(vocab=index, **{"merges": []} if kind == "GPT2" else {})
    tokenizer.save_pretrained(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    before = load_tokens(tmp_path).encode(["The caf\u00e9 t"])
    config.write_text(json.dumps(json.loads(config.read_text()) | told))
    wanted = AutoTokenizer.from_pretrained(tmp_path)(["The caf\u00e9 t"])["input_ids"]
    assert load_tokens(tmp_path).encode(["The caf\u00e9 t"]) == wanted != before


def test_what_cannot_be_read_is_one_message(tmp_path):
    library_model(tmp_path, TAILS["nothing"], "cls")
    listed = tmp_path / "model" / "modules.json"
    before = listed.read_text()
    listed.write_text(before.replace("pooling.Pooling", "x.WeightedLayerPooling"))
    refused(ConfigError, "is a SentenceTransformer of Transformer, WeightedLayerPooling", adapter_of, tmp_path)
    listed.write_text(before.replace('"path": ""', '"path": "0_Transformer"'))
    refused(ConfigError, "has its transformer in 0_Transformer, .* save it again", adapter_of, tmp_path)
    listed.write_text(before)
    assert ours(tmp_path)[0].f.pooling == ("cls",)
    told = tmp_path / "model" / "config_sentence_transformers.json"
    told.write_text('{"truncate_dim": 8, "model_type": "SparseEncoder"}')
    assert "truncate_dim 8 of the folder is not applied" in ours(tmp_path)[0].f.remarks[-1]
    refused(ConfigError, "is a SparseEncoder. Load it with that class", open_folder, tmp_path / "model", CPU, None)
    tokens = load_tokens(tmp_path / "model")
    refused(ConfigError, r"max_length 2 .* 2 special tokens. Set it to 3", tokens.encode, ["a cat"], 2)
    transformers.ByT5Tokenizer().save_pretrained(tmp_path)
    refused(DataError, "ByT5Tokenizer is written in Python", load_tokens, tmp_path)


def test_pickles_are_read_only_where_that_is_allowed_and_layers_are_trained(tmp_path, monkeypatch):
    model = library_model(tmp_path, TAILS["dense"])
    whole, _ = ours(tmp_path)
    layer = next((tmp_path / "model").glob("2_*"))
    for path in (layer / "model.safetensors", tmp_path / "model" / "model.safetensors"):
        torch.save(load_file(path), path.with_name("pytorch_model.bin"))
        path.unlink()
        with pytest.raises(ConfigError, match=r"pytorch_model\.bin are a pickle.*DIPOLE_PICKLES=restricted") as caught:
            ours(tmp_path)
        command = re.search(r"python -m (\S+) (\S+pytorch_model.bin)", str(caught.value))
        with monkeypatch.context() as patch:
            patch.setenv("DIPOLE_PICKLES", "restricted")
            assert same_weights(ours(tmp_path)[0], whole)
        refused(DataError, "are a pickle", open_folder, tmp_path / "model", CPU, None)
        assert import_module(command[1]).main([command[2]]) == 0
        assert same_weights(ours(tmp_path)[0], whole)
    again = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert (again.encode(TEXTS) == model.encode(TEXTS)).all()
    library_model(tmp_path, TAILS["dense"])
    model, _ = ours(tmp_path)
    model.represent(make_batch([[2, 5, 3], [2, 7, 8, 3]])).square().sum().backward()
    assert all(bool(p.grad.any()) for p in model.f.layers.parameters())


def same_weights(first, second):
    one, other = first.state_dict(), second.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


WORDS = ["the", "film", "was", "good", "bad", "very", ".", "boring", "great"]
FILMS = ["the film was good .", "", "very very bad", "unheard of", "great", "the film was very very boring ."]
word_encoder = partial(make_encoder, words=WORDS)
ALONE = """
import numpy, torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer
folders, texts, plain_folders, sentences = json.loads(sys.argv[1])
said = {}
for folder in folders:
    flag = {}
    try:
        model = SentenceTransformer(folder, device="cpu")
    except ValueError as error:
        said[folder], flag = str(error), {"trust_remote_code": True}
        model = SentenceTransformer(folder, device="cpu", **flag)
    model.save(folder + "-again", create_model_card=False)
    again = SentenceTransformer(folder + "-again", device="cpu", **flag)
    one_by_one = model.encode(texts, batch_size=1)
    numpy.save(folder + ".npy", numpy.stack([model.encode(texts), one_by_one, again.encode(texts)]))
for folder, code, mean in plain_folders:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, **({"trust_remote_code": True} if code else {})).eval()
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    mask = batch["attention_mask"]
    with torch.no_grad():
        states = model(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
    vectors = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True) if mean else states[:, 0]
    numpy.save(folder + ".npy", vectors.numpy())
assert not any(name.partition(".")[0] == "dipole" for name in sys.modules)
print("", json.dumps(said), sep="\\n")  # behind the question whether to run the code
"""


def own_tokenizer(tmp_path):
    """Subwords that close a sentence with [SEP], as BERT has them."""
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = frame_of("[CLS] $A [SEP]")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return load_tokens(tmp_path)


@pytest.mark.parametrize("place", ["here", pytest.param("process", marks=pytest.mark.slow)])
def test_a_program_without_dipole_loads_every_kind_of_folder(tmp_path, capsys, place):
    """With the library's own modules where they can say it, else with code of the folder, where that is allowed."""
    tokens = own_tokenizer(tmp_path)
    model = encoders.SentenceModel(small_transformer(len(tokens), 8, 1, 2, "cls"), None)
    bert, turn = SentenceEncoder(model, tokens), torch.randn(8, 8)
    turned = SentenceEncoder(model, tokens, "unit", max_length=64, transform=lambda features: features @ turn.T)
    code = {"gru": word_encoder("combine"), "halves": word_encoder("bow"), "sides": word_encoder("transformer")}
    code |= {"unscaled": word_encoder("uni", "none"), "projected": word_encoder("bi")}
    matrix = torch.randn(code["projected"].model.width, code["projected"].model.width)
    before = code["projected"].encode(FILMS)
    code["projected"].transform = lambda features: features @ matrix.T
    assert np.abs(code["projected"].encode(FILMS) - before).max() > 0.1
    plain = {"bert": bert, "projected bert": turned, "unit": word_encoder("bow", "unit")}
    folders = {name: tmp_path / name for name in code | plain}
    for name, encoder in (code | plain).items():
        export_sentence_transformer(encoder, folders[name])
    made, sentences = {name: make() for name, make in ENCODERS.items()}, [text for text in SENTENCES if text]
    for name, encoder in made.items():
        (tmp_path / "transformers" / name).mkdir(parents=True)
        export_as("transformers", encoder, tmp_path / "transformers" / name, Record())
        assert any((tmp_path / "transformers" / name).glob("*.py")) == (name != "bert")
    assert json.loads((tmp_path / "transformers/bert/config.json").read_text())["model_type"] == "bert"
    others = [[str(tmp_path / "transformers" / name), name != "bert", name == "bert"] for name in made]
    given = json.dumps([[str(folder) for folder in folders.values()], FILMS, others, sentences])
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    if place == "here":
        run_here(ALONE, given, tmp_path / "modules")
        said = capsys.readouterr().out
    else:
        program = [sys.executable, "-c", WITHOUT_DIPOLE + ALONE, given]
        said = subprocess.run(program, env=environment, capture_output=True, check=True, text=True).stdout
    for name, encoder in (code | plain).items():
        vectors = np.load(f"{folders[name]}.npy")
        for each in vectors:  # all at once, one by one, and saved again
            assert each == pytest.approx(encoder.encode(FILMS), abs=1e-5), name
        assert np.array_equal(vectors[0], vectors[2]), name
    said = json.loads(said.splitlines()[-1])
    assert set(said) == {str(folders[name]) for name in code}
    assert all("trust_remote_code=True" in message for message in said.values())
    for name, encoder in made.items():
        wanted = encoder.encode(sentences, normalize="none" if name == "bert" else None)
        assert np.load(tmp_path / "transformers" / f"{name}.npy") == pytest.approx(wanted, abs=1e-6), name
        again = open_folder(tmp_path / "transformers" / name, CPU, None).vectors(sentences).numpy()
        assert again == pytest.approx(wanted, abs=1e-6), name


def test_a_bag_of_words_of_one_piece_is_written_with_the_librarys_own_modules(tmp_path, monkeypatch):
    """Fixed beside trained words, projected. The mean of rows at unit length is their sum at unit length."""
    encoder = word_encoder("bow")
    side = encoders.Channels([encoder.model.f, encoder.model.g])
    matrix = torch.randn(12, 12)
    model = encoders.SentenceModel(side, None)
    encoder = SentenceEncoder(model, encoder.tokens, "halves", 4, transform=lambda x: x @ matrix.T)
    export_sentence_transformer(encoder, tmp_path / "out")
    modules = json.loads((tmp_path / "out/modules.json").read_text())
    assert [module["type"].rpartition(".")[2] for module in modules] == ["StaticEmbedding", "Normalize"]
    assert not list((tmp_path / "out").glob("*.py"))
    again = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    for encode in (again.encode, again.encode_query, again.encode_document):  # each has a prompt of its own
        assert encode(FILMS) == pytest.approx(encoder.encode(FILMS), abs=1e-5)
    encoder = word_encoder("bow")
    right = encoder.encode
    monkeypatch.setattr(encoder, "encode", lambda texts, **how: right(texts, **how) + 0.1)
    refused(TrainingError, r"differ by 0\.1", export_sentence_transformer, encoder, tmp_path / "out")


def test_mteb_runs_on_the_exported_folder(tmp_path):
    mteb = pytest.importorskip("mteb")
    unknown = ("reference", "date", "domains", "task_subtypes", "license", "annotations_creators", "dialect",
               "sample_creation", "bibtex_citation")  # fmt: skip
    from mteb.abstasks.classification import AbsTaskClassification
    from mteb.abstasks.task_metadata import TaskMetadata

    class Films(AbsTaskClassification):
        metadata = TaskMetadata(
            name="TinyFilms", description="good or bad", dataset={"path": "local/none", "revision": "1"},
            type="Classification", category="t2c", modalities=["text"], eval_splits=["test"], eval_langs=["eng-Latn"],
            main_score="accuracy", **dict.fromkeys(unknown),
        )  # fmt: skip
        samples_per_label = 4
        n_experiments = 2

        def load_data(self, **ignored):
            rows = {"text": ["the film was good .", "great", "very good", "good film"] * 4, "label": [1] * 16}
            rows["text"] += ["the film was bad .", "boring", "very bad", "bad film"] * 4
            rows["label"] += [0] * 16
            part = datasets.Dataset.from_dict(rows)
            self.dataset = datasets.DatasetDict({"train": part, "test": part})
            self.data_loaded = True

    export_sentence_transformer(word_encoder("bow"), tmp_path / "out")
    model = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    result = mteb.evaluate(model, Films(), cache=None, show_progress_bar=False)
    assert result.task_results[0].scores["test"][0]["main_score"] > 0.8


@pytest.mark.parametrize(("name", "shown"), [
    ("/home/me/books", "books"), ("../books/", "books"), (r"C:\me\books.txt", "books.txt"), ("cifar10", "cifar10"),
    ("hub:org/books", "hub:org/books"), ("hub:/home/me/books", "books"), ("/", "unknown"),
])  # fmt: skip
def test_the_name_of_data_for_readers_elsewhere(name, shown):
    assert public_name({"name": name}) == shown
