"""Pairs given by the user: classes as positives, tables of images, images and their captions."""

import json
import shutil
from functools import partial

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from torch.nn.functional import cosine_similarity
from transformers import AutoModel, AutoTokenizer

from dipole import objective
from dipole.core.cli import main
from dipole.core.train.config import TrainConfig
from dipole.core.train.memory_saving import PatchedEncoders
from dipole.core.train.model import load_run
from dipole.core.train.run_folder import RunFolder
from dipole.core.utils.errors import ConfigError, DataError
from dipole.vision.adapter import VisionAdapter
from dipole.vision.evaluation import recall, zero_shot
from dipole.vision.pairs import read_pairs, split_rows
from dipole.vision.sources import Decoding
from tests.runs import assert_same_weights, commanded, interrupted, refused
from tests.text.tiny_sentences import tiny_model
from tests.vision.made import configured, image_table, make_adapter

SIDE, ROWS = 12, 40
adapter = partial(make_adapter, batch_size=8)
COLOURS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200), "white": (200, 200, 200)}
SMALL = {"encoder": {"name": "small-conv", "width": 4, "projector": "linear", "dim": 8}, "augment": {"size": SIDE}}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A folder: pairs.csv with 40 rows, their images, and a small BERT with its tokenizer."""
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "images").mkdir()
    draw = np.random.default_rng(0)
    rows = []
    for number in range(ROWS):
        colour = list(COLOURS)[number % 4]
        row = {"image": f"images/{number}.png", "positive": f"images/{number}b.png"}
        for name in row.values():
            pixels = np.clip(np.array(COLOURS[colour]) + draw.integers(-30, 30, (SIDE, SIDE, 3)), 0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name)
        rows.append(row | {"caption": f"a {colour} square , number {number}"})
    pandas.DataFrame(rows).to_csv(folder / "pairs.csv", index=False)
    tiny_model(folder / "bert", words=" ".join(["a square number , photo of", *COLOURS, *map(str, range(ROWS))]))
    return folder


def settings(folder=None, **table):
    """A [vision] table, with a folder one of captions."""
    if folder is not None:
        table = {
            "pairs": "columns", "columns": ["image", "caption"], "caption": {"encoder": f"hub:{folder / 'bert'}"},
            "data": {"source": str(folder / "pairs.csv")}, **table,
        }  # fmt: skip
    return configured({**SMALL, **table})


def pairs_of(path, *columns, captions=False, **options):
    return read_pairs(str(path), list(columns or ("image", "positive")), captions, Decoding(**options))


def test_the_positives_of_labels_are_all_views_of_the_class_and_groups_fill_the_batch(table):
    made = adapter(settings(pairs="labels", views=3, data={"limit": 64}), batch_size=16)
    batch = next(iter(made.batches(0)))
    embedded = made.embed(batch)
    pairs = embedded.relate(dict(embedded.rows))
    labels = batch.labels.repeat(3)
    for anchor, row in enumerate(pairs.positives.tolist()):
        same = {other for other in range(48) if labels[other] == labels[anchor] and other != anchor}
        assert {other for other in row if other >= 0} == same
    made = adapter(settings(pairs="labels", images_per_class=4, data={"limit": 200}), batch_size=16)
    for batch in made.batches(0):
        groups = batch.labels.view(4, 4)
        assert (groups == groups[:, :1]).all()
        assert len(batch.rows.view(4, 4)[0].unique()) == 4
    refused(ConfigError, "multiple of 4", adapter, settings(pairs="labels", images_per_class=4), batch_size=18)
    refused(ConfigError, "has no labels", adapter, settings(pairs="labels", data={"source": str(table / "images")}))
    assert not {"pairs", "columns"} & settings().determining().keys()  # runs from before keep their names


@pytest.mark.parametrize(("wrong", "said"), [
    ({"pairs": "labels", "method": "byol"}, "'byol' cannot carry pairs = 'labels'"),
    ({"pairs": "labels", "negatives": 3}, "negatives has no effect"),
    ({"pairs": "columns", "columns": ["a", "b"], "method": "blocks"}, "'blocks' cannot carry"),
    ({"pairs": "columns", "columns": ["a", "b"], "method": "cmc"}, "'cmc' cannot carry"),
    ({"columns": ["a", "b"]}, "columns has no effect with pairs 'augmented'"),
    ({"images_per_class": 2}, "images_per_class has no effect"), ({"caption": {"encoder": "bert"}}, "hub:ID-or-folder"),
    ({"pairs": "columns", "data": {"source": "x.csv"}}, "columns must name two or more"),
    ({"pairs": "columns", "columns": ["a", "b"]}, "set vision.data.source to a file"),
    ({"pairs": "columns", "columns": ["image", "caption"], "data": {"source": "x.csv"}}, "vision.caption.encoder"),
    ({"method": "clip"}, "'clip' cannot carry pairs = 'augmented'"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(wrong, said):
    refused(ValidationError, said, settings, **wrong)


def test_views_come_from_the_columns_and_no_image_is_on_both_sides(table, tmp_path):
    still = {"size": SIDE, "crop_scale": [1, 1], "crop_ratio": [1, 1], "flip": 0, "jitter": 0, "grey": 0}
    data = {"source": str(table / "pairs.csv")}
    made = adapter(settings(pairs="columns", columns=["image", "positive"], augment=still, data=data))
    batch = next(iter(made.batches(0)))
    pairs = made.parts.pretrain
    for view, column in zip(batch.views, pairs.columns, strict=True):
        torch.testing.assert_close(view, column[batch.rows] / 255, atol=1e-5, rtol=0)
    assert not torch.equal(*batch.views)
    number = int(pairs.ids[batch.rows[0], 0]) // 2
    stored = np.asarray(Image.open(table / "images" / f"{number}b.png"))
    assert np.array_equal(pairs.others[0][batch.rows[0]].permute(1, 2, 0).numpy(), stored)
    results = made.evaluate(objective("infonce", dim=8))
    ways, names = ("first_to_second", "second_to_first"), ("recall@1", "recall@5", "recall@10", "chance@1")
    assert set(results) == {f"retrieval/{way}/{name}" for way in ways for name in names}
    rows = [{"image": str(table / f"images/{n % 10}.png"), "caption": f"number {n}"} for n in range(30)]
    pandas.DataFrame(rows).to_csv(tmp_path / "pairs.csv", index=False)
    pairs = pairs_of(tmp_path / "pairs.csv", "image", "caption", captions=True)
    for seed in range(5):
        first, second = split_rows(pairs, 0.6, torch.Generator().manual_seed(seed))
        assert len(first) + len(second) == 30
        assert len(first) == 18
        assert not set(first.ids[:, 0].tolist()) & set(second.ids[:, 0].tolist())


def test_cells_of_lines_and_of_parquet(tmp_path, table):
    cells = enumerate((["one ", "  another"], None, "third"))
    lines = [{"image": str(table / f"images/{number}.png"), "caption": cell} for number, cell in cells]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.warns(UserWarning, match="1 of 3 rows lack"):
        pairs = pairs_of(tmp_path / "pairs.jsonl", "image", "caption", captions=True)
    assert pairs.captions == ("one", "another", "third")
    assert torch.equal(pairs.images[0], pairs.images[1])
    contents = [(table / f"images/{n}.png").read_bytes() for n in range(4)]
    Image.new("CMYK", (SIDE, SIDE)).save(tmp_path / "print.jpg")
    contents += [(tmp_path / "print.jpg").read_bytes(), b"broken"]
    image_table(contents, caption=list("abcdef")).to_parquet(str(tmp_path / "pairs.parquet"))
    with pytest.warns(UserWarning, match=r"skipped 1 of 6 .*row 6"):
        pairs = pairs_of(tmp_path / "pairs.parquet", "image", "caption", captions=True, on_corrupt="skip")
    assert pairs.captions == tuple("abcde")
    stored = torch.from_numpy(np.array(Image.open(table / "images/2.png"))).permute(2, 0, 1)
    assert torch.equal(pairs.images[2], stored)


def test_wrong_tables_are_one_message(tmp_path, table):
    source = shutil.copy(table / "pairs.csv", tmp_path / "pairs.csv")
    shutil.copytree(table / "images", tmp_path / "images")
    refused(DataError, r"pairs.csv, line 2: no column 'picture'.*Set vision.columns", pairs_of, source, "picture", "x")
    for cell in ("https://x.org/a.png", "data:image/png;base64", "iVBORw0KGgo" * 40):
        (tmp_path / "texts.csv").write_text(f"image,positive\n{cell},images/3.png\n")
        refused(DataError, r"line 2: column 'image' holds .*base64\.b64decode", pairs_of, tmp_path / "texts.csv")
    (tmp_path / "texts.csv").write_text("image,positive\n~nobody42/x.png,images/3.png\n")
    refused(DataError, r"~nobody42/x\.png: no such image file", pairs_of, tmp_path / "texts.csv")
    (tmp_path / "images/3.png").unlink()
    refused(DataError, r"pairs.csv, line 5: .*3.png: no such image file", pairs_of, source)
    (tmp_path / "images/3.png").write_bytes(b"no image")
    refused(DataError, r"pairs.csv, line 5: .*3.png", pairs_of, source)
    for memory in (4e9, 1.0):  # decoded at once, and batch by batch
        with pytest.warns(UserWarning, match="skipped 1 of 80"):
            pairs = pairs_of(source, on_corrupt="skip", memory=memory)
        assert len(pairs) == 39
        assert 6 not in pairs.ids
        assert len(pairs.broken()) == 1
        stored = np.asarray(Image.open(table / "images/4b.png"))
        assert np.array_equal(pairs.others[0][torch.tensor([3])][0].permute(1, 2, 0).numpy(), stored)
    said = r"If the column holds captions, set vision.caption.encoder"
    refused(DataError, said, pairs_of, table / "pairs.csv", "image", "caption")


def test_captions_are_read_as_transformers_reads_them(table):
    made = adapter(settings(table))
    batch = next(iter(made.batches(0)))
    texts = [made.parts.pretrain.captions[row] for row in batch.rows.tolist()]
    branch = made.module.caption.eval()
    tokens = AutoTokenizer.from_pretrained(table / "bert")(texts, padding=True, return_tensors="pt")
    hidden = AutoModel.from_pretrained(table / "bert").eval()(**tokens).last_hidden_state
    weight = tokens["attention_mask"].float()
    expected = (hidden * weight[..., None]).sum(1) / weight.sum(1, keepdim=True)
    torch.testing.assert_close(branch(*batch.captions), branch.projector(expected), atol=1e-5, rtol=1e-5)
    assert (branch.limit, branch.tokens([" ".join(["red"] * 50)])[0].shape[1]) == (32, 32)


@pytest.mark.parametrize("text", ["infonce(temperature=learned, init=0.07)", "siglip"])
def test_captions_in_microbatches_are_the_undivided_batch(table, text):
    found = []
    for size in (None, 3):
        made = adapter(settings(table))
        made.module.eval()
        loss_of = objective(text, dim=8)
        encoding = PatchedEncoders(made.encoders(), TrainConfig(steps=1, microbatch=size), compiles=False)
        with encoding():
            embedded = made.embed(next(iter(made.batches(0))))
        loss_of(embedded).loss.backward()
        found.append([p.grad for p in made.module.parameters() if p.requires_grad])
        assert all(grad is not None for grad in found[-1])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_recall_by_a_loop_ignores_the_image_itself_and_refuses_infinite_vectors():
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([[n // 2, n] for n in range(20)])
    f, b = torch.randn(10, 6, generator=generator), torch.randn(20, 6, generator=generator)
    a = f[ids[:, 0]]
    scores = cosine_similarity(f[:, None], b[None], dim=2)
    order = scores.argsort(1, descending=True).tolist()
    for k in (1, 5, 10):
        expected = np.mean([any(place // 2 == image for place in row[:k]) for image, row in enumerate(order)])
        assert recall(a, b, ids)[f"recall@{k}"] == pytest.approx(expected)
        back = scores.T.argsort(1, descending=True).tolist()
        expected = np.mean([caption // 2 in row[:k] for caption, row in enumerate(back)])
        assert recall(b, a, ids.flip(1))[f"recall@{k}"] == pytest.approx(expected)
    assert recall(a, b, ids)["chance@1"] == pytest.approx(0.1)
    assert zero_shot(torch.eye(3), torch.eye(3), torch.tensor([0, 2, -1])) == 0.5
    z, ids = torch.eye(4), torch.arange(4).repeat(2, 1).T
    z[1, 2] = torch.nan
    for measure, given in ((recall, (torch.eye(4), z, ids)), (zero_shot, (z, torch.eye(4), torch.arange(4)))):
        refused(DataError, "1 of 4 rows are not finite", measure, *given)
    z = torch.nn.functional.normalize(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
    ids = torch.tensor([[0, 1], [1, 0], [2, 3], [3, 2]])
    near = torch.stack([z[0], z[0] + 0.1 * z[1], z[2], z[2] + 0.1 * z[3]])
    assert recall(near[ids[:, 0]], near[ids[:, 1]], ids, same_kind=True)["recall@1"] == 1


def trained(folder, runs):
    return commanded(
        "digits-simclr", runs,
        "vision.method=clip", "vision.pairs=columns", "vision.columns=['image','caption']", "vision.views=",
        f"vision.caption.encoder=hub:{folder / 'bert'}", f"vision.data.source={folder / 'pairs.csv'}",
        "vision.encoder.width=4", "vision.encoder.hidden=", "vision.encoder.projector=linear", "vision.encoder.dim=8",
        f"vision.augment.size={SIDE}", "train.batch_size=8", "train.epochs=", "train.steps=6", "train.warmup=0",
        "train.checkpoint_every=2", "objective=infonce(temperature=learned, init=0.07)",
    )  # fmt: skip


def test_a_run_with_captions_is_used_without_its_table(tmp_path, table):
    there = tmp_path / "there"
    shutil.copytree(table, there)
    folder = RunFolder(trained(there, tmp_path / "runs"))
    results = folder.read_record().results
    assert 0 <= results["retrieval/image_to_caption/recall@1"] <= 1
    assert "untrained/retrieval/caption_to_image/recall@5" in results
    _, made, loss_of = load_run(folder, "cpu")
    again = made.evaluate(loss_of)
    ours = {name: value for name, value in results.items() if name.startswith("retrieval/")}
    assert {name: again[name] for name in ours} == pytest.approx(ours)
    before = made.module.eval().caption(*made.module.caption.tokens(["a red square"]))
    shutil.rmtree(there)
    caption = load_run(folder, "cpu")[1].module.eval().caption
    assert torch.equal(caption(*caption.tokens(["a red square"])), before)
    assert main(["export", str(folder.path), "--to", "transformers", "--out", str(tmp_path / "exported")]) == 0


def test_resume_with_captions_is_bit_exact(tmp_path, table):
    whole = trained(table, tmp_path / "whole")
    with interrupted(VisionAdapter, "embed", 3) as calls:
        with pytest.raises(AssertionError):
            trained(table, tmp_path / "parts")
        parts = trained(table, tmp_path / "parts")
    assert len(calls) == 6
    assert_same_weights(whole, parts)


def test_labelled_images_besides_give_probes_and_zero_shot(tmp_path, table):
    for number in range(ROWS):
        home = tmp_path / "classes" / list(COLOURS)[number % 4]
        home.mkdir(parents=True, exist_ok=True)
        shutil.copy(table / f"images/{number}.png", home)
    data = {"source": str(tmp_path / "classes"), "pretrain": str(table / "pairs.csv")}
    made = adapter(settings(table, data=data, probe={"probes": ["knn"], "neighbours": 2}))
    results = made.evaluate(objective("infonce", dim=8))
    assert {"knn/accuracy", "zero_shot/accuracy", "retrieval/caption_to_image/recall@1"} <= set(results)
    assert (len(made.parts.pretrain), len(made.parts.test_pairs)) == (24, 16)


def test_a_plan_reads_no_table(table):
    config = settings(table, data={"source": "nowhere.csv"})
    for each in (config, settings(pairs="labels")):
        sketch = VisionAdapter.sketch(each, 8)
        loss_of = objective("infonce", dim=sketch.width)
        assert sketch.width == 8
        assert loss_of(sketch.example(loss_of, sketch.width, *sketch.arguments)).loss.isfinite()
