"""The domain as the trainer sees it: batches, pairs, evaluation, and steps that read nothing back from the device."""

import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

import dipole
from dipole.core.evaluation.diagnostics import pair_histogram
from dipole.core.train.class_blocks import BlockShape, block_losses
from dipole.core.train.evaluation import diagnose
from dipole.core.utils.errors import ConfigError, DataError
from dipole.text.adapter import _is_development
from dipole.text.config import TextSettings
from dipole.text.corpus import Document
from dipole.text.encoders.networks import takes_whole_mask
from dipole.text.evaluation import held_back, labelled_documents
from dipole.text.model import expanded
from tests.device_reads import META, no_cuda_waits, no_reads
from tests.elsewhere import ELSEWHERE, elsewhere
from tests.runs import refused
from tests.text.made import text_adapter, write_rows

WORDS = [f"word{i}" for i in range(30)]


@pytest.fixture
def corpus(tmp_path):
    """Ten documents of 30 sentences. Document d has a few words of its own."""
    draw = np.random.default_rng(0)
    rows = []
    for d in range(10):
        own = WORDS[3 * d : 3 * d + 3]
        sentences = [" ".join(draw.choice(own, size=3 + i % 3)) + " ." for i in range(30)]
        rows.append({"id": f"d{d}", "sentences": sentences})
    return write_rows(tmp_path / "corpus.jsonl", rows)


def with_table(settings, tmp_path):
    """Settings of columns get a table, some of whose rows have a negative."""
    if settings.get("pairs") != "columns":
        return settings
    draw = np.random.default_rng(2)
    texts = [" ".join(draw.choice(WORDS, size=3 + i % 3)) for i in range(180)]
    rows = [{"query": texts[3 * k], "pos": texts[3 * k + 1], "neg": texts[3 * k + 2 :][: k % 2]} for k in range(60)]
    return settings | {"corpus": write_rows(tmp_path / "pairs.jsonl", rows)}


def make(corpus_file, tmp_path, batch_size=40, seed=0, **settings):
    context = {key: settings.pop(key) for key in ("rank", "world_size", "validation", "device") if key in settings}
    settings = {"corpus": corpus_file, "hidden_size": 8, "word_size": 6, "held_out": 0.2} | settings
    return text_adapter(settings, batch_size, seed, workdir=tmp_path, **context)


def paired(adapter, batch):
    """The pairs of a batch in one process."""
    embedded = adapter.embed(batch)
    return embedded.relate(embedded.rows)


def restored(batch):
    """Padded ids back as sentences in order."""
    rows = [ids[:n].tolist() for chunk in batch.chunks for ids, n in zip(chunk.ids, chunk.lengths, strict=True)]
    return [rows[i] for i in batch.order]


def test_batches_are_consecutive_and_leave_the_ends_of_documents_out(corpus, tmp_path):
    adapter = make(corpus, tmp_path, order="sequential")
    assert adapter.steps_per_epoch == 6
    found = list(adapter.batches(0))
    rows = np.concatenate([np.arange(30 * d, 30 * d + 24) for d in range(10)])
    assert [ids for b in found for ids in restored(b.batch)] == [ids.tolist() for ids in adapter.sentences.ids(rows)]
    assert torch.cat([b.document for b in found]).tolist() == [i // 30 for i in rows]
    assert set(adapter.held_rows) == set(range(300)) - set(rows)
    refused(DataError, "fewer than", make, corpus, tmp_path, limit=30)
    cached = [make(corpus, tmp_path, order="sequential", cache=str(tmp_path / "cache")) for _ in range(2)]
    assert cached[0].data_info() == cached[1].data_info() == adapter.data_info()
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize(
    "pairs", [{}, {"pairs": "blocks", "block_size": 4}, {"pairs": "blocks", "blocks": "random", "block_size": 3}]
)
def test_batches_depend_on_seed_and_epoch_alone_and_ranks_share_them(corpus, tmp_path, pairs):
    adapter, again = make(corpus, tmp_path, **pairs), make(corpus, tmp_path, **pairs)
    all_of = [restored(b.batch) for b in adapter.batches(3)]
    assert all_of[2:] == [restored(b.batch) for b in again.batches(3, start=2)]
    assert all_of != [restored(b.batch) for b in adapter.batches(4)]
    assert all_of != [restored(b.batch) for b in make(corpus, tmp_path, seed=1, **pairs).batches(3)]
    whole = next(adapter.batches(0))
    halves = [next(make(corpus, tmp_path, rank=r, world_size=2, **pairs).batches(0)) for r in (0, 1)]
    assert restored(halves[0].batch) + restored(halves[1].batch) == restored(whole.batch)


def test_neighbours_stay_inside_documents(corpus, tmp_path):
    adapter = make(corpus, tmp_path, order="sequential", window=2, self_logit="drop")
    batch = next(adapter.batches(0))
    document = batch.document
    for i, positives in enumerate(paired(adapter, batch).positives):
        expected = {j for j in range(i - 2, i + 3) if j != i and 0 <= j < 40 and document[j] == document[i]}
        assert {int(p) for p in positives if p >= 0} == expected
    pairs = paired(make(corpus, tmp_path, self_logit="zero"), next(make(corpus, tmp_path).batches(0)))
    assert int((pairs.candidates == 0).all(1).sum()) == 1


def test_quick_thoughts_is_the_loss_of_the_authors_code(corpus, tmp_path):
    """Scores f g^T with the diagonal set to 0, targets 1/2 on each neighbour (1 at the ends), rows only."""
    adapter = make(corpus, tmp_path, order="sequential", batch_size=20, limit=26, held_out=0.0)
    batch = next(adapter.batches(0))
    f, g = (side.double() for side in adapter.module(batch.batch))
    scores = (f @ g.T).fill_diagonal_(0)
    neighbours = torch.diag(torch.ones(19, dtype=torch.float64), 1)
    targets = neighbours + neighbours.T
    targets /= targets.sum(1, keepdim=True)
    expected = -(targets * torch.log_softmax(scores, 1)).sum(1).mean()
    found = dipole.objective("quickthoughts")(adapter.embed(batch)).loss
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_blocks_hold_consecutive_or_random_sentences_of_one_document(corpus, tmp_path):
    adapter = make(corpus, tmp_path, pairs="blocks", block_size=4)
    batch = next(adapter.batches(0))
    blocks = batch.index.view(-1, 5)
    assert torch.equal(blocks - blocks[:, :1], torch.arange(5).expand(8, 5))
    assert torch.equal(blocks // 30, batch.document.view(-1, 5))
    assert (batch.document.view(-1, 5) == blocks[:, :1] // 30).all()
    assert adapter.module.g is None
    assert paired(adapter, batch).positives.shape == (40, 4)
    refused(ConfigError, r"multiple of 7.*nearest: 42", make, corpus, tmp_path, pairs="blocks", block_size=6)
    refused(DataError, "no document", make, corpus, tmp_path, pairs="blocks", block_size=39)
    adapter = make(corpus, tmp_path, pairs="blocks", blocks="random", block_size=4, block_count=6)
    assert adapter.steps_per_epoch == 10 * 6 * 5 // 40
    for batch in adapter.batches(0):
        blocks = batch.document.view(-1, 5)
        assert (blocks == blocks[:, :1]).all()
        assert torch.equal(paired(adapter, batch).labels, batch.document)
        assert set(batch.index.tolist()) <= set(adapter.train_rows)


@pytest.mark.parametrize("blocks", ["consecutive", "random"])
def test_negative_blocks_collide_as_independent_classes_do(corpus, tmp_path, blocks):
    """Arora et al., Sec. 6.1: some c_i^- is c^+ with probability tau_k = 1 - (1 - 1/C)^k."""
    adapter = make(corpus, tmp_path, encoder="bow", batch_size=24, pairs="blocks", blocks=blocks, block_size=1)
    for k in (1, 4):
        objective, collided = dipole.objective(f"blocks(k={k})").terms[0], []
        for epoch in range(25):
            for batch in adapter.batches(epoch):
                prepared = objective.prepare(paired(adapter, batch))
                owner = batch.document[::2]
                drawn = objective.negatives(prepared, k) - prepared.first_negative
                assert all(len(set(row)) == k for row in drawn.tolist())
                collided.append((owner[drawn] == batch.document.unsqueeze(1)).any(1).double().mean())
        share, expected = float(torch.stack(collided).mean()), 1 - 0.9**k
        spread = float(torch.stack(collided).std()) / len(collided) ** 0.5
        assert abs(share - expected) < 4 * spread
        assert spread < 0.01
    draws = [[paired(adapter, batch).facts.draw for batch in adapter.batches(epoch)] for epoch in range(2)]
    assert len({*draws[0], *draws[1]}) == 2 * adapter.steps_per_epoch
    assert [paired(adapter, batch).facts.draw for batch in adapter.batches(1, 2)] == draws[1][2:]


def test_gradients_are_clipped_tensor_by_tensor(corpus, tmp_path):
    free, bound = make(corpus, tmp_path), make(corpus, tmp_path, clip_per_tensor=0.01)
    for adapter in (free, bound):
        (adapter.module(next(adapter.batches(0)).batch)[0] * 100).sum().backward()
        adapter.before_step()
    for a, b in zip(free.module.parameters(), bound.module.parameters(), strict=True):
        if a.grad is None:
            continue
        norm = float(a.grad.norm())
        assert float(b.grad.norm()) == pytest.approx(min(norm, 0.01), rel=1e-4)
        assert torch.allclose(b.grad * max(1.0, norm / 0.01), a.grad, rtol=1e-3, atol=1e-6)


def test_a_bag_of_words_learns_which_sentences_are_neighbours(corpus, tmp_path):
    adapter = make(corpus, tmp_path, encoder="bow", word_size=16, batch_size=48)
    before = adapter.evaluate(None)
    loss = dipole.objective("quickthoughts", dim=16)
    optimizer = torch.optim.Adam(adapter.module.parameters(), lr=0.02)
    for epoch in range(12):
        for batch in adapter.batches(epoch):
            loss(adapter.embed(batch)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    after = adapter.evaluate(loss)
    assert after["next_mrr"] > 1.5 * before["next_mrr"]
    assert after["document/knn"] > 0.9
    shown = pair_histogram(adapter.held_out_pairs(loss))
    correct, incorrect = (counts / counts.sum() for counts in (shown.correct, shown.incorrect))
    assert (shown.edges[1:] + shown.edges[:-1]) @ (correct - incorrect) < 0
    assert float(correct.sum()) == pytest.approx(1, abs=1e-3)
    assert len((tmp_path / "nearest_sentences.txt").read_text().splitlines()) == 18


def test_multichannel_and_expansion(corpus, tmp_path):
    vectors = tmp_path / "vectors.txt"
    draw = np.random.default_rng(0)
    lines = [f"{w} " + " ".join(f"{v:.3f}" for v in draw.normal(size=4)) for w in [*WORDS[:25], "novel", "a_phrase"]]
    vectors.write_text("\n".join(lines))
    adapter = make(corpus, tmp_path, channels="both", vectors=str(vectors), expand=True)
    assert adapter.embedding_dim == 16
    encoder = adapter.encoder()
    assert "novel" in encoder.tokens.index
    assert "a_phrase" not in encoder.tokens.index
    plain = expanded(adapter.module, adapter.tokens, str(vectors))[0]
    other = make(corpus, tmp_path, channels="both", vectors=str(vectors)).encoder()
    assert encoder.encode(["word1 word2"]) == pytest.approx(other.encode(["word1 word2"]), abs=1e-5)
    assert plain.width == 16
    assert not np.allclose(encoder.encode("novel"), encoder.encode("word29xyz"))
    vectors.write_text("nothing 1 2\n")
    refused(DataError, "holds no word of the corpus", make, corpus, tmp_path, channels="fixed", vectors=str(vectors))


@pytest.mark.parametrize(("settings", "message"), [
    ({"channels": "both"}, "needs vectors"),
    ({"pairs": "blocks", "window": 2}, "window has no effect"),
    ({"encoder": "bow", "direction": "uni"}, "direction has no effect"),
    ({"vectors": "x.txt"}, "vectors has no effect"), ({"expand": True}, "expand needs"),
    ({"blocks": "random"}, "blocks has no effect"),
    ({"pairs": "blocks", "block_count": 3}, "block_count has no effect"),
    ({"classifiers": ("mean",), "held_out": 0.0}, "Set held_out above 0"),
    ({"losses": True, "held_out": 0.0}, "losses are those of held-out sentences"),
    ({"held_out": 0.5, "development": 0.5}, "leave nothing for training"),
    ({"pairs": "columns"}, "set corpus to a file"),
    ({"pairs": "columns", "corpus": "x", "columns": ("a",)}, "must name an anchor, a positive"),
    ({"pairs": "columns", "corpus": "x", "window": 2}, "window has no effect"),
    *(({"pairs": "columns", "corpus": "x", "label": "y", "label_use": "target", "label_from": each}, "number above 0")
      for each in (-3.0, 0, "yes")),
    ({"columns": ("a", "b")}, "columns has no effect"),
    ({"pairs": "views"}, r"dropout is 0.*Set\s+text\.dropout, for example 0\.1"),
    ({"pairs": "views", "encoder": "transformer"}, r"dropout is 0.*Set\s+text\.dropout"),
    ({"pairs": "views", "dropout": 0.2, "sides": 2}, "Leave sides out"),
    ({"head": "mlp"}, "head has no effect with encoder 'gru'"),
    ({"encoder": "transformer", "hidden_size": 10}, "hidden_size 10 is no multiple of heads 4"),
])  # fmt: skip
def test_settings_that_contradict_each_other(settings, message):
    refused(ValueError, message, TextSettings, **settings)


def test_the_recipe_of_quick_thoughts_follows_the_authors(corpus, tmp_path):
    """Two GRUs of 2 x 600, 400 consecutive sentences in the order of the text. Only the corpus is exchanged here."""
    path = Path(dipole.__file__).parents[1] / "benchmarks/recipes/quick-thoughts.toml"
    recipe = tomllib.loads(path.read_text())
    assert recipe["objective"] == "quickthoughts"
    train = recipe["train"]
    assert (train["batch_size"], train["optimizer"], train["learning_rate"]) == (400, "adam", 5e-4)
    settings = recipe["text"] | {"corpus": corpus, "unit": "documents", "hidden_size": 8}
    adapter = make(corpus, tmp_path, **settings)
    assert (adapter.module.output_width, adapter.module.f.direction) == (16, "bi")
    assert adapter.config.clip_per_tensor == 5
    steps = [batch.document for batch in adapter.batches(0)]
    assert torch.equal(torch.cat(steps), torch.from_numpy(adapter.sentences.document[: 40 * len(steps)]).long())
    assert [restored(b.batch) for b in adapter.batches(1)] == [restored(b.batch) for b in adapter.batches(0)]


@pytest.mark.parametrize(("settings", "first"), [({"development": 0.1}, 21), ({}, 15)])
def test_a_validation_part_lies_between_training_and_test(corpus, tmp_path, settings, first):
    adapter = make(corpus, tmp_path, validation=0.3, **settings)
    assert (adapter.part, set(adapter.held_rows % 30)) == ("validation", set(range(first, 24)))
    adapter.part = "test"
    assert set(adapter.held_rows % 30) == set(range(24, 30))
    assert set(adapter.train_rows % 30) == set(range(first))


def test_classifiers_and_losses_of_arora_measure_held_out_sentences(corpus, tmp_path):
    adapter = make(corpus, tmp_path, encoder="bow", classifiers=("trained", "mean", "few"))
    found = adapter.evaluate(None)
    sides = [adapter._probe().sides(rows)[0].double() for rows in (adapter.train_rows, adapter.held_rows)]
    owners = [torch.from_numpy(adapter.sentences.document[rows]) for rows in (adapter.train_rows, adapter.held_rows)]
    means = torch.stack([sides[0][owners[0] == d].mean(0) for d in range(10)])
    scores = sides[1] @ means.T
    assert found["document/mean/top-1"] == pytest.approx(float((scores.argmax(1) == owners[1]).double().mean()))
    binary = []
    for point, owner in zip(scores, owners[1].tolist(), strict=True):
        binary += [float(point[owner] > point[other]) for other in range(10) if other != owner]
    assert found["document/mean/avg-2"] == pytest.approx(sum(binary) / len(binary), abs=1e-6)
    assert {f"document/{name}/{task}" for name in ("trained", "few") for task in ("avg-10", "top-5")} <= set(found)
    adapter = make(corpus, tmp_path, encoder="bow", pairs="blocks", block_size=3, losses=True)
    found = adapter.evaluate(dipole.objective("blocks(k=2)"))
    parts = []
    for rows in (adapter.train_rows, adapter.held_rows):
        parts += [adapter._probe().sides(rows)[0], torch.from_numpy(adapter.sentences.document[rows])]
    expected = block_losses(*parts, BlockShape(3, 2), adapter.seed.probe)
    assert {f"losses/{name}": value for name, value in expected.items()}.items() <= found.items()
    assert not [name for name in found if name.startswith("document/mean")]


@pytest.fixture
def labelled(tmp_path):
    """Sixty documents of two classes with words of their own and common ones. The last fifteen are for testing."""
    draw = np.random.default_rng(1)
    rows = []
    for number in range(60):
        own = WORDS[:15] if number % 2 else WORDS[10:25]
        sentences = [" ".join(draw.choice(own, size=3)) for _ in range(1 + number % 4)]
        split = "test" if number >= 45 else "train"
        rows.append({"id": number, "label": "pos" if number % 2 else "neg", "split": split, "sentences": sentences})
    return rows


def test_labelled_documents_are_told_by_the_mean_of_their_sentences(corpus, labelled, tmp_path):
    adapter = make(corpus, tmp_path, encoder="bow", labelled=write_rows(tmp_path / "labelled.jsonl", labelled))
    found = adapter.evaluate(None)["labelled/accuracy"]
    encode = adapter.encoder().encode
    x = np.stack([np.mean([encode(s) for s in row["sentences"]], axis=0) for row in labelled])
    y = np.array([row["label"] for row in labelled])
    scaler = StandardScaler().fit(x[:45])
    model = LogisticRegression(C=1.0, max_iter=1000).fit(scaler.transform(x[:45]), y[:45])
    assert found == pytest.approx(model.score(scaler.transform(x[45:]), y[45:]), abs=1e-6)
    assert found > 0.6
    bare = [{key: row[key] for key in ("label", "sentences")} for row in labelled]
    found = list(labelled_documents(write_rows(tmp_path / "bare.jsonl", bare)))
    assert sum(tested for _, label, tested in found if label == "pos") == 6  # every fifth of thirty
    for rows, message in (
        ([{"text": "One."}], "no column 'label'; it has text"),
        ([{"label": 1, "text": "One.", "split": "dev"}], "train or test, got 'dev'"),
        ([{"label": 1, "text": "One.", "split": "train"}], "no documents for testing"),
        ([{"label": 1, "text": "One.", "split": split} for split in ("train", "test")], "one class alone for training"),
    ):
        path = write_rows(tmp_path / "wrong.jsonl", rows)
        refused(DataError, message, make, corpus, tmp_path, encoder="bow", labelled=path)
    for field in ("senteval", "labelled"):  # before anything is trained
        refused(DataError, "absent", make, corpus, tmp_path, **{field: str(tmp_path / "absent")})
    documents = [(Document(str(i), ["a"]), "even" if i % 2 else "odd", i >= 80) for i in range(100)]
    found = list(held_back(documents, 0.25, np.random.default_rng(0)))
    assert [document.name for document, _, _ in found] == [str(i) for i in range(80)]
    assert 10 <= sum(tested for _, _, tested in found) <= 30
    assert found == list(held_back(documents, 0.25, np.random.default_rng(0)))
    names = ["next/accuracy", "senteval/MR/accuracy", "senteval/MR/dev", "senteval/MRPC/f1", "senteval/STS14/spearman"]
    assert [name for name in names if _is_development(name)] == ["next/accuracy", "senteval/MR/dev"]


@pytest.mark.parametrize("settings", [
    {"classifiers": ("trained", "mean", "few"), "losses": True, "pairs": "blocks", "batch_size": 39},
    {"pairs": "columns"}, {"labelled": "labelled.jsonl"},
], ids=lambda settings: " ".join(settings))  # fmt: skip
def test_what_a_device_has_made_is_measured_there(corpus, labelled, tmp_path, monkeypatch, settings):
    """On a stand-in for a device, which refuses tensors of the processor and keeps features, the same numbers."""
    if "labelled" in settings:
        settings = settings | {"labelled": write_rows(tmp_path / settings["labelled"], labelled)}

    def measured(device):
        asked = {"encoder": "bow", "device": torch.device(device)} | with_table(settings, tmp_path)
        adapter = make(corpus, tmp_path, **asked)
        features, owners = adapter.features("test")
        assert features.device.type == device
        numbers = adapter.evaluate(None) | diagnose(features, owners, None)[0]
        shown = pair_histogram(adapter.held_out_pairs(None)).correct.tolist()
        return numbers, shown, [path.read_text() for path in tmp_path.glob("nearest_*.txt")]

    numbers, *shown = measured("cpu")
    with elsewhere(40 * 50):  # scores come back, and points for Arora's terms
        found, *also = measured(ELSEWHERE.type)
    assert found == pytest.approx(numbers, rel=1e-6)
    assert also == shown
    assert shown[1]
    adapter = make(corpus, tmp_path, encoder="bow", probe_device="cpu", device=ELSEWHERE)
    assert adapter.features("test")[0].device.type == "cpu"


SETTINGS = pytest.mark.parametrize("settings", [
    {"encoder": "bow"},
    {"encoder": "bow", "sides": 1, "window": 2, "self_logit": "zero", "dropout": 0.1},
    {"encoder": "bow", "pairs": "blocks", "block_size": 2},
    {"encoder": "transformer", "layers": 1, "heads": 2},
    {"encoder": "transformer", "layers": 1, "heads": 2, "pooling": "cls"},
    {"encoder": "bow", "pairs": "views", "dropout": 0.1},
    {"encoder": "bow", "pairs": "columns", "dropout": 0.1},
], ids=lambda settings: " ".join(map(str, settings.values())))  # fmt: skip


@SETTINGS
def test_an_encoder_reads_nothing_back(settings, corpus, tmp_path):
    adapter = make(corpus, tmp_path, 12, **with_table(settings, tmp_path))
    found = next(iter(adapter.batches(0)))
    adapter.module.to(META).train()
    batch = replace(found, batch=found.batch.to(META), document=found.document.to(META), index=found.index.to(META))
    if found.masks is not None:
        batch = replace(batch, masks=found.masks.to(META))
    if found.partners is not None:
        there = {name: getattr(found.partners, name).to(META) for name in ("batch", "place", "absent")}
        batch = replace(batch, partners=replace(found.partners, **there))
    objectives = ["infonce + dp"]
    if settings["encoder"] == "bow":
        objectives += ["quickthoughts", "blocks", "tuple" if settings.get("pairs") == "blocks" else "hcl"]
    for text in objectives:
        with no_reads():
            dipole.objective(text)(adapter.embed(batch)).loss.backward()
            adapter.before_step()


@pytest.mark.parametrize(("name", "more", "is_whole"), [
    ("BertConfig", {}, True), ("RobertaConfig", {}, True), ("DistilBertConfig", {"dim": 16, "n_heads": 2}, True),
    ("BertConfig", {"is_decoder": True}, False), ("GPT2Config", {"n_embd": 16, "n_head": 2}, False),
    ("LlamaConfig", {}, False), ("ModernBertConfig", {"local_attention": 2, "pad_token_id": 0}, False),
])  # fmt: skip
def test_a_mask_of_whole_rows_attends_to_the_same_tokens(name, more, is_whole):
    """The rows a GPU gets instead of one for each sentence. Decoders and sliding windows have their own mask."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.AutoModel.from_config(getattr(transformers, name)(vocab_size=30, **{**sizes, **more})).eval()
    ids = torch.randint(3, 30, (3, 9))
    mask = torch.arange(9) < torch.tensor([9, 4, 2])[:, None]
    whole = model(input_ids=ids, attention_mask=mask[:, None, None, :].expand(-1, 1, 9, -1)).last_hidden_state
    by_row = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    assert takes_whole_mask(model.config) is is_whole is torch.allclose(whole[mask], by_row[mask], atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@SETTINGS
def test_a_step_on_a_gpu_waits_for_nothing(settings, corpus, tmp_path):
    device = torch.device("cuda")
    adapter = make(corpus, tmp_path, 12, device=device, **with_table(settings, tmp_path))
    adapter.module.to(device).train()
    term = dipole.objective("quickthoughts")
    batches = list(adapter.batches(0))
    term(adapter.embed(batches[0])).loss.backward()
    with no_cuda_waits():
        term(adapter.embed(batches[1])).loss.backward()
        adapter.before_step()
