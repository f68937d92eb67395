"""A trained vision model without its images: embedding of any source, and folders that other libraries load."""

import io
import json
import shutil

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel

from dipole.core.cli import main
from dipole.core.train.model import evaluate_run, load_run
from dipole.core.train.run_folder import RunFolder
from dipole.core.utils.errors import CheckpointError, ConfigError, DataError, OptionError
from dipole.core.utils.pictures import open_rgb
from dipole.vision.adapter import VisionAdapter
from dipole.vision.encoders.hub import write_processor
from dipole.vision.exported import open_folder
from dipole.vision.inference import view_of
from tests.runs import Record, commanded, refused
from tests.vision.made import CPU, ONE_STEP, configured, make_adapter, opened, png, read_images, source_of
from tests.vision.test_hub_encoders import configs


def write_images(folder):
    draw = np.random.default_rng(0)
    for label in range(3):
        pixels = draw.integers(0, 256, (14, 16, 16, 3), dtype=np.uint8)
        pixels[..., label] //= 4
        source_of("folder", folder / f"class{label}", list(map(png, pixels)))
    return folder


def trained(folder, *settings, method="simclr"):
    """A run of two steps on images of its own, and its folder."""
    images = write_images(folder / "images")
    flags = [f"vision.data.source={images}", f"vision.method={method}", "vision.probe.probes=['knn']"]
    flags += ["vision.encoder.width=4", "vision.encoder.dim=8", "vision.augment.size=16", "vision.probe.neighbours=2"]
    flags += ["train.batch_size=9", "train.epochs=", "train.steps=2", *settings]
    if method != "simclr":
        flags.append("vision.views=")
    return commanded("digits-simclr", folder / "runs", *flags)


def save_images(folder, images):
    return source_of("folder", folder, [png(image.permute(1, 2, 0).squeeze(2).numpy()) for image in images])


def probed(run):
    """Test features as the run's probes see them, and the test images."""
    _, adapter, objective = load_run(RunFolder(run), "cpu")
    adapter.module.eval()
    features = adapter.evaluation.extract(adapter.module, adapter.module.features, adapter.parts.test.images)
    return features, adapter.parts.test.images, objective


@pytest.mark.parametrize("method", ["simclr", "moco", "cmc"])
def test_a_run_folder_needs_nothing_beside_itself(tmp_path, method):
    settings = ["vision.negatives=9"] if method in ("moco", "cmc") else []
    run = trained(tmp_path / "there", *settings, method=method)
    features, images, _ = probed(run)
    results = RunFolder(run).read_record().results
    inputs = save_images(tmp_path / "inputs", images)
    moved, data = tmp_path / "elsewhere", tmp_path / "data"
    shutil.move(run, moved)
    shutil.move(tmp_path / "there" / "images", data)
    shutil.rmtree(tmp_path / "there")
    out = tmp_path / "f.npy"
    assert main(["embed", str(moved), inputs, "-o", str(out), "--quiet"]) == 0
    assert np.array_equal(np.load(out), features.numpy())  # the bits that the probes see
    assert json.loads((tmp_path / "f.ids.json").read_text()) == [f"{n:03}.png" for n in range(len(images))]
    if method == "cmc":
        export = load_run(RunFolder(moved), "cpu")[1].export
        refused(ConfigError, "two encoders", export, "transformers", tmp_path, None)
    else:
        assert main(["export", str(moved), "--to", "transformers", "--out", str(tmp_path / "out")]) == 0
        found = open_folder(tmp_path / "out", CPU, None).vectors(list(images))
        torch.testing.assert_close(found, features, atol=1e-6, rtol=1e-5)
    refused(DataError, r"(?s)model itself is complete.*vision\.data", evaluate_run, RunFolder(moved), "cpu")
    record, found = evaluate_run(RunFolder(moved), "cpu", [f"vision.data.source={data}"])
    assert record.evaluations[-1].agrees
    assert found.results == results  # baselines of the untrained network included


def test_the_embedding_is_what_the_objective_sees(tmp_path):
    run = trained(tmp_path, "objective=infonce + 0.1*cllr")
    _, adapter, objective = load_run(RunFolder(run), "cpu")
    adapter.module.eval()
    images = adapter.parts.test.images
    embedder = adapter.embedder("embedding", objective)
    wanted = objective.transform(adapter.features("test")[0]).detach()
    assert torch.equal(embedder.vectors(list(images)), wanted)
    refused(OptionError, "Allowed: encoder, embedding", adapter.embedder, "head", objective)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("run"))


def test_grey_runs_read_grey_levels(tmp_path):
    run = commanded("digits-simclr", tmp_path / "runs", *ONE_STEP)
    features, images, _ = probed(run)
    inputs = save_images(tmp_path / "inputs", images)
    colour = [f"vision.data.source={save_images(tmp_path / 'colour', images.expand(-1, 3, -1, -1))}"]
    refused(DataError, "the images have 3 channels, and the model reads 1", evaluate_run, RunFolder(run), "cpu", colour)
    out = tmp_path / "f.parquet"
    assert main(["embed", str(run), inputs, "-o", str(out), "--quiet"]) == 0
    table = pyarrow.parquet.read_table(out)
    assert table.column_names == ["path", "features"]
    assert np.array_equal(np.array(table["features"].to_pylist(), dtype=np.float32), features.numpy())


def test_what_is_no_image_is_refused(tmp_path):
    for nothing in (tmp_path / "nothing", "nothing/"):
        refused(DataError, r"no data at .*nothing.*a path must exist", read_images, nothing)
    refused(DataError, "holds no images", read_images, tmp_path)
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    np.savez(tmp_path / "a.npz", images=np.zeros((2, 4, 4), np.uint8))
    for source in (tmp_path, tmp_path / "a.png", tmp_path / "a.npz"):
        refused(OptionError, "no columns", read_images, source, "text")
    refused(DataError, r"a\.png cannot be decoded", list, read_images(tmp_path).rows)
    said = r"a\.png cannot be decoded.*Give an image that can be read, or .*a parquet file"
    refused(DataError, said, list, read_images(tmp_path / "a.png").rows)


def test_models_that_are_damaged_foreign_or_of_no_such_folder_are_refused(tmp_path, run):
    copied = RunFolder(shutil.copytree(run, tmp_path / "copied"))
    (copied.kept / "vision.json").write_text("{")
    refused(CheckpointError, "damaged", load_run, copied, "cpu")
    shutil.rmtree(copied.kept)
    refused(CheckpointError, r"the model is incomplete: .*kept is missing", load_run, copied, "cpu")
    source = checkpoint(tmp_path / "model", "vit")
    settings = [f"vision.encoder.name=hub:{source}", "vision.encoder.tap=layer1"]
    run = trained(tmp_path / "there", *settings, *NOT_THEIRS)
    _, adapter, _ = load_run(RunFolder(run), "cpu")
    for to, said in (("transformers", "ends with 'layer1'; choose --to onnx"), ("timm", "no network like a ViTModel")):
        refused(ConfigError, said, adapter.export, to, tmp_path, None)
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text("raise SystemExit('was run')")
    refused(ValueError, "foreign code is not run", make_adapter, {"encoder": {"name": f"hub:{tmp_path}"}}, 8)


NOT_THEIRS = ("vision.encoder.width=", "vision.encoder.dim=")  # settings of our own networks


def checkpoint(folder, name):
    torch.manual_seed(4)
    AutoModel.from_config(configs()[name]).save_pretrained(folder)
    return folder


CASES = [
    ("vit", "mean", [], 1e-5), ("vit", "cls", ["vision.encoder.lora={rank = 2}"], 1e-5),
    ("convnext", "max", [], 1e-5), ("swin", "mean", [], 1e-5),
    ("vit", "mean", ["vision.augment.size=24"], 0.01),  # resized as bytes
]  # fmt: skip
MARKED = [pytest.param(*case, marks=[] if case[0] == "convnext" else pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize(("name", "pooling", "more", "near"), MARKED)
def test_every_folder_gives_the_features_of_the_run(tmp_path, name, pooling, more, near):
    source = checkpoint(tmp_path / "model", name)
    settings = [f"vision.encoder.name=hub:{source}", f"vision.encoder.pooling={pooling}"]
    run = trained(tmp_path / "there", *settings, *NOT_THEIRS, *more)
    features, images, _ = probed(run)
    inputs = save_images(tmp_path / "inputs", images)
    moved = shutil.move(run, tmp_path / "elsewhere")
    for gone in ("there", "model"):
        shutil.rmtree(tmp_path / gone)

    def embedded(folder):
        out = tmp_path / "f.npy"
        assert main(["embed", str(folder), inputs, "-o", str(out), "--quiet"]) == 0
        return np.load(out)

    assert np.array_equal(embedded(moved), features.numpy())
    for to in ("transformers", "onnx"):
        assert main(["export", str(moved), "--to", to, "--out", str(tmp_path / to)]) == 0
        assert embedded(tmp_path / to) == pytest.approx(features.numpy(), abs=near)
    card = (tmp_path / "transformers" / "README.md").read_text()
    assert {"mean": ".mean(", "cls": "[:, 0]", "max": ".amax("}[pooling] in card  # what the run's features are
    assert json.loads((tmp_path / "transformers" / "config.json").read_text())["model_type"] == name


PIXELS = np.random.default_rng(0).integers(0, 256, (6, 12, 12, 3), dtype=np.uint8)


def saved(folder, kind):
    """The six pictures as a source of one kind."""
    if kind == "npz":
        np.savez(folder / "x.npz", images=PIXELS, labels=np.arange(6))
        return str(folder / "x.npz")
    return source_of(kind, folder, list(map(png, PIXELS)))


@pytest.mark.parametrize("kind", ["npz", "folder", "shards", "parquet", "saved"])
def test_every_training_source_is_read(tmp_path, kind):
    names, images = zip(*read_images(saved(tmp_path, kind)).rows, strict=True)
    assert len(set(names)) == 6
    assert torch.equal(torch.stack(images), torch.from_numpy(PIXELS).permute(0, 3, 1, 2))
    assert all(image.shape == (1, 12, 12) for _, image in read_images(saved(tmp_path, kind), channels=1).rows)


def test_tables_of_image_files_are_read(run, tmp_path, capsys):
    write_images(tmp_path / "images")
    files = [f"images/class{label}/00{label}.png" for label in (1, 0, 1)]
    rows = [",".join(row) for row in zip(files, files[1:] + files[:1], "bab", strict=True)]
    (tmp_path / "pairs.csv").write_text("\n".join(["file_name,Positive,label", *rows, ",x.png,a"]))
    (tmp_path / "split.csv").write_text(f"image,split\n{files[0]},train\n{files[1]},val\n")
    with pytest.warns(UserWarning, match="'split' of .*train, val.* is not read"):
        opened(tmp_path / "split.csv")
    embedder = load_run(RunFolder(run), "cpu")[1].embedder()
    for column, names in ((None, files), ("Positive", files[1:] + files[:1])):
        embedder.on_corrupt = "skip"
        found = list(embedder.read(str(tmp_path / "pairs.csv"), column).rows)
        assert [name for name, _ in found] == names
        stored = [np.asarray(Image.open(tmp_path / name)) for name in names]
        assert all(np.array_equal(image.permute(1, 2, 0), one) for (_, image), one in zip(found, stored, strict=True))
    command = ["embed", str(run), str(tmp_path / "pairs.csv"), "-o", str(tmp_path / "x.npy")]
    assert main(command) == 1
    assert "pairs[3] cannot be decoded (the cell is empty)" in capsys.readouterr().err
    assert main([*command, "--column", "x"]) == 1
    assert "no column 'x'; it has file_name, Positive, label. Set" in capsys.readouterr().err
    with pytest.warns(UserWarning, match=r"skipped 1 of 4 .*pairs\[3\]"):
        images = opened(tmp_path / "pairs.csv", on_corrupt="skip")
    assert (images.name, images.class_names, images.labels.tolist()) == ("pairs", ("a", "b"), [1, 0, 1])


def test_broken_files_are_refused_or_skipped_and_listed(run, tmp_path, capsys):
    source = saved(tmp_path, "folder")
    (tmp_path / "001.png").write_bytes(png(PIXELS[1])[:60])
    (tmp_path / "004\u202e.jpg").write_text("no picture")
    out = tmp_path / "features.npy"
    assert main(["embed", str(run), source, "-o", str(out)]) == 1
    assert "--on-corrupt skip" in capsys.readouterr().err
    assert main(["embed", str(run), source, "-o", str(out), "--on-corrupt", "skip", "--json", "--quiet"]) == 0
    told = capsys.readouterr()
    answer = json.loads(told.out)
    assert (answer["rows"], [line.partition(" ")[0] for line in answer["skipped"]]) == (5, ["001.png", "004\u202e.jpg"])
    assert (told.err.count("skipped "), "\u202e" in told.err, "\\u202e" in told.err) == (2, False, True)
    assert json.loads(out.with_suffix(".ids.json").read_text()) == [f"{number:03}.png" for number in (0, 2, 3, 4, 5)]
    (tmp_path / "\udcff.png").write_bytes(png(PIXELS[1]))
    out = out.with_suffix(".parquet")
    assert main(["embed", str(run), source, "-o", str(out), "--on-corrupt", "skip", "--quiet"]) == 0
    assert pyarrow.parquet.read_table(out)["path"].to_pylist()[-1] == "\\udcff.png"


def test_export_and_run_agree_on_every_shape_and_keep_the_order(run, tmp_path):
    out = tmp_path / "onnx"
    assert main(["export", str(run), "--to", "onnx", "--out", str(out)]) == 0
    shapes = [(40, 12), (12, 31), (25, 30), (12, 12), (13, 12), (40, 12)]
    contents = []
    for height, width in shapes:
        rows = np.linspace(0, 1, height)[:, None, None] * np.array([1, 0, 0.3])
        columns = np.linspace(1, 0, width)[None, :, None] * np.array([0, 1, 0.7])
        contents.append(png(np.uint8(255 * (rows + columns).clip(0, 1))))
    source = source_of("folder", tmp_path / "x", contents)
    _, adapter, _ = load_run(RunFolder(run), "cpu")
    mine, exported = adapter.embedder(), open_folder(out, CPU, None)
    images, given = ([image for _, image in each.read(source).rows] for each in (mine, exported))
    found, theirs = mine.vectors(images), exported.vectors(given)
    one_by_one = torch.cat([mine.vectors([image]) for image in images])
    torch.testing.assert_close(found, one_by_one, atol=1e-5, rtol=1e-5)
    for row, (content, vector, other) in enumerate(zip(contents, found, theirs, strict=True)):
        stored = torch.from_numpy(np.array(Image.open(io.BytesIO(content)).convert("RGB"))).permute(2, 0, 1)[None]
        probes = adapter.evaluation.extract(adapter.module, adapter.module.features, stored)[0]
        for each in (other, probes):
            assert torch.nn.functional.cosine_similarity(vector, each, dim=0).item() > 0.9999, shapes[row]


@pytest.mark.parametrize("shape", [(41, 41), (20, 20), (16, 16), (9, 9), (24, 33)])
def test_images_stored_larger_than_the_views_are_resized_once(tmp_path, shape):
    """As by the exported processor, also if they are square."""
    (tmp_path / "x.png").write_bytes(png(np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)))
    write_processor(tmp_path, 16, 3)
    ((_, row),) = read_images(tmp_path / "x.png", None, 20, size=16).rows
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    expected = processor(Image.open(tmp_path / "x.png"), return_tensors="pt")["pixel_values"][0] * 255
    assert row.shape == (3, 16, 16)
    assert (row - expected).abs().max() <= 1.5  # levels of 256


@pytest.mark.parametrize(("mode", "kind", "options"), [
    ("1", "PNG", {}), ("L", "PNG", {}), ("1", "TIFF", {"compression": "group4"}), ("P", "GIF", {}),
])  # fmt: skip
def test_a_small_file_of_a_huge_picture_is_refused(mode, kind, options):
    data = io.BytesIO()
    Image.new(mode, (5100, 5100)).save(data, kind, **options)
    refused(ValueError, r"5100 x 5100 pixels in .* would take gigabytes", open_rgb, data.getvalue())


@pytest.mark.parametrize(("data", "said"), [
    (b"", "the file is empty"), (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    (b"<!DOCTYPE html><html>", "cannot identify image file, which begins with b'<!DOCTYPE html><'"),
    (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "PostScript is not read; save it as PNG"),
    (b"II*\0" + bytes(50), r"a TIFF that Pillow does not read\. Save it in 8-bit RGB.*\.npz"),
])  # fmt: skip
def test_what_a_file_holds_in_place_of_an_image_is_named(data, said):
    refused(ValueError, said, open_rgb, data)
    refused(ValueError, said, view_of, data, None, 8)


@pytest.mark.parametrize("channels", [2, 5])
def test_images_of_any_channels_train_and_embed(tmp_path, channels):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 8, 12, channels), dtype=np.uint8)
    path = str(tmp_path / "many.npz")
    np.savez(path, images=pixels, labels=np.arange(40) % 4)
    adapter = make_adapter({"data": {"source": path}, "encoder": {"width": 4, "dim": 8}, "augment": {"size": 6}}, 8)
    batch = next(iter(adapter.batches(0)))
    assert batch.views[0].shape == (8, channels, 6, 6)
    adapter.embed(batch)
    adapter.module.eval()
    adapter.export("transformers", tmp_path, Record())
    adapter.draw(tmp_path / "query.png", None, "now")
    embedder = open_folder(tmp_path, CPU, None)
    rows = [image for _, image in embedder.read(path).rows]
    assert torch.equal(rows[7], torch.from_numpy(pixels[7]).permute(2, 0, 1))
    torch.testing.assert_close(embedder.vectors(rows), adapter.embedder().vectors(rows))


@pytest.mark.parametrize("encoder", ["linear", "alexnet"])
def test_an_encoder_of_one_size_is_refused_with_small_crops(encoder):
    swav = {"small_views": 2, "small_size": 20}
    table = {"method": "swav", "encoder": {"name": encoder}, "swav": swav, "augment": {"size": 32}}
    message = rf"'{encoder}' reads images of 32 pixels alone, and views .* also have 20"
    refused(ConfigError, message, make_adapter, table, 8)
    refused(ConfigError, "small_views = 0", VisionAdapter.sketch, configured(table), 8)


@pytest.mark.parametrize(("table", "said"), [
    ({"method": "moco"}, "vision.negatives: the queue has 65536 rows, and there are"),
    ({"method": "nnclr"}, "vision.nnclr.support: the queue has 98304 rows"),
    ({"method": "swav", "negatives": 5000}, "vision.negatives: the queue has 5000 rows"),
    ({"method": "moco", "negatives": 512}, None), ({"method": "nnclr", "nnclr": {"support": 64}}, None),
])  # fmt: skip
def test_a_queue_longer_than_the_data_is_named(table, said):
    found = [line for line in make_adapter(table, 8).remarks() if "queue" in line]
    assert len(found) == (said is not None)
    assert not found or said in found[0]
