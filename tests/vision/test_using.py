"""A trained vision model without its images: embedding of any source, and folders that other libraries load."""

import io
import json
import shutil

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from dipole.core.cli import main
from dipole.core.train.run_folder import RunFolder
from dipole.core.train.trained_run import evaluate_run, load_run
from dipole.core.utils.errors import CheckpointError, ConfigError, DataError, OptionError
from dipole.core.utils.pictures import open_rgb
from dipole.core.utils.seeding import Seeds
from dipole.vision.data import DataConfig, load
from dipole.vision.exported import open_folder
from dipole.vision.inference import read_images
from tests.vision.made import configured, image_table, make_adapter, png, tar
from tests.vision.test_hub_encoders import configs

CPU = torch.device("cpu")


def write_images(folder, classes=3, each=14, side=16):
    draw = np.random.default_rng(0)
    for label in range(classes):
        (folder / f"class{label}").mkdir(parents=True)
        for number in range(each):
            pixels = draw.integers(0, 256, (side, side, 3), dtype=np.uint8)
            pixels[:, :, label] //= 4
            Image.fromarray(pixels).save(folder / f"class{label}" / f"{number:02}.png")
    return folder


def trained(folder, *settings, method="simclr"):
    """A run of two steps on images of its own, and its folder."""
    images = write_images(folder / "images")
    flags = [f"vision.data.source={images}", f"vision.method={method}", "vision.probe.probes=['knn']"]
    flags += ["vision.encoder.width=4", "vision.encoder.dim=8", "vision.augment.size=16", "vision.probe.neighbours=2"]
    flags += ["train.batch_size=9", "train.epochs=", "train.steps=2", *settings]
    if method != "simclr":
        flags.append("vision.views=")
    runs = folder / "runs"
    assert main(["train", "digits-simclr", "--runs", str(runs), "--quiet", "--set", *flags]) == 0
    (run,) = (path for path in runs.iterdir() if path.is_dir())
    return run


def save_images(folder, images):
    folder.mkdir()
    for number, image in enumerate(images):
        Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy()).save(folder / f"{number:03}.png")
    return str(folder)


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
        with pytest.raises(ConfigError, match="two encoders"):
            load_run(RunFolder(moved), "cpu")[1].export("transformers", tmp_path, None)
    else:
        assert main(["export", str(moved), "--to", "transformers", "--out", str(tmp_path / "out")]) == 0
        found = open_folder(tmp_path / "out", CPU, None).vectors(list(images))
        torch.testing.assert_close(found, features, atol=1e-6, rtol=1e-5)
    with pytest.raises(DataError, match=r"(?s)model itself is whole.*vision\.data"):
        evaluate_run(RunFolder(moved), "cpu")
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
    with pytest.raises(OptionError, match="Allowed: encoder, embedding"):
        adapter.embedder("head", objective)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("run"))


def test_images_of_any_size_stay_in_order(run):
    _, adapter, _ = load_run(RunFolder(run), "cpu")
    embedder = adapter.embedder()
    draw = torch.Generator().manual_seed(0)
    shapes = [(16, 16), (40, 24), (16, 16), (17, 31), (40, 24)]
    rows = [torch.randint(0, 256, (3, *shape), generator=draw, dtype=torch.uint8) for shape in shapes]
    one_by_one = torch.cat([embedder.vectors([row]) for row in rows])
    torch.testing.assert_close(embedder.vectors(rows), one_by_one, atol=1e-5, rtol=1e-5)


def test_grey_runs_read_grey_levels(tmp_path):
    settings = ["train.epochs=", "train.steps=1", "vision.encoder.width=2", "vision.probe.probes=['knn']"]
    assert main(["train", "digits-simclr", "--runs", str(tmp_path / "runs"), "--quiet", "--set", *settings]) == 0
    (run,) = (path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    features, images, _ = probed(run)
    inputs = save_images(tmp_path / "inputs", images)
    out = tmp_path / "f.parquet"
    assert main(["embed", str(run), inputs, "-o", str(out), "--quiet"]) == 0
    table = pyarrow.parquet.read_table(out)
    assert table.column_names == ["path", "features"]
    assert np.array_equal(np.array(table["features"].to_pylist(), dtype=np.float32), features.numpy())


def test_what_is_no_image_is_refused(tmp_path):
    with pytest.raises(DataError, match="neither an image nor a folder"):
        read_images(str(tmp_path / "nothing"), None, None, 3)
    with pytest.raises(DataError, match="holds no images"):
        read_images(str(tmp_path), None, None, 3)
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    np.savez(tmp_path / "a.npz", images=np.zeros((2, 4, 4), np.uint8))
    for source in (tmp_path, tmp_path / "a.png", tmp_path / "a.npz"):
        with pytest.raises(OptionError, match="no columns"):
            read_images(str(source), "text", None, 3)
    with pytest.raises(DataError, match=r"a\.png cannot be decoded"):
        list(read_images(str(tmp_path), None, None, 3).rows)


def test_a_damaged_or_incomplete_model_is_refused(tmp_path, run):
    copied = RunFolder(shutil.copytree(run, tmp_path / "copied"))
    (copied.kept / "vision.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        load_run(copied, "cpu")
    shutil.rmtree(copied.kept)
    with pytest.raises(CheckpointError, match=r"the model is incomplete: .*kept is missing"):
        load_run(copied, "cpu")


NOT_THEIRS = ("vision.encoder.width=", "vision.encoder.dim=")  # settings of our own networks


def checkpoint(folder, name):
    from transformers import AutoModel

    torch.manual_seed(4)
    AutoModel.from_config(configs()[name]).save_pretrained(folder)
    return folder


CASES = [
    ("vit", "mean", [], 1e-5),
    ("vit", "cls", ["vision.encoder.lora={rank = 2}"], 1e-5),
    ("convnext", "max", [], 1e-5),
    ("swin", "mean", [], 1e-5),
    ("vit", "mean", ["vision.augment.size=24"], 0.01),  # resized as bytes
]


@pytest.mark.parametrize(
    ("name", "pooling", "more", "near"),
    [pytest.param(*case, marks=[] if case[0] == "convnext" else pytest.mark.slow) for case in CASES],
)
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


def test_what_has_no_such_folder_is_refused(tmp_path):
    source = checkpoint(tmp_path / "model", "vit")
    settings = [f"vision.encoder.name=hub:{source}", "vision.encoder.tap=layer1"]
    run = trained(tmp_path / "there", *settings, *NOT_THEIRS)
    _, adapter, _ = load_run(RunFolder(run), "cpu")
    for to, said in (("transformers", "ends with 'layer1'; choose --to onnx"), ("timm", "no network like a ViTModel")):
        with pytest.raises(ConfigError, match=said):
            adapter.export(to, tmp_path, None)


PIXELS = np.random.default_rng(0).integers(0, 256, (6, 12, 12, 3), dtype=np.uint8)


def saved(folder, kind):
    """The six pictures as a source of one kind."""
    if kind == "npz":
        np.savez(folder / "x.npz", images=PIXELS, labels=np.arange(6))
        return str(folder / "x.npz")
    if kind == "folder":
        for number, each in enumerate(PIXELS):
            (folder / f"{number}.png").write_bytes(png(each))
        return str(folder)
    if kind == "shards":
        tar(folder / "x-0.tar", [(f"{number}.png", png(each)) for number, each in enumerate(PIXELS)])
        return f"wds:{folder}/x-0.tar"
    table, path = image_table(map(png, PIXELS)), str(folder / ("x.parquet" if kind == "parquet" else "saved"))
    (table.to_parquet if kind == "parquet" else table.save_to_disk)(path)
    return path


@pytest.mark.parametrize("kind", ["npz", "folder", "shards", "parquet", "saved"])
def test_every_training_source_is_read(tmp_path, kind):
    names, images = zip(*read_images(saved(tmp_path, kind), None, None, 3).rows, strict=True)
    assert len(set(names)) == 6
    assert torch.equal(torch.stack(images), torch.from_numpy(PIXELS).permute(0, 3, 1, 2))
    assert all(image.shape == (1, 12, 12) for _, image in read_images(saved(tmp_path, kind), None, None, 1).rows)


def test_broken_files_are_refused_or_skipped_and_listed(run, tmp_path, capsys):
    source = saved(tmp_path, "folder")
    (tmp_path / "1.png").write_bytes(png(PIXELS[1])[:60])
    (tmp_path / "4.jpg").write_text("no picture")
    out = tmp_path / "features.npy"
    assert main(["embed", str(run), source, "-o", str(out)]) == 1
    assert "--on-corrupt skip" in capsys.readouterr().err
    assert main(["embed", str(run), source, "-o", str(out), "--on-corrupt", "skip", "--json", "--quiet"]) == 0
    told = capsys.readouterr()
    answer = json.loads(told.out)
    assert (answer["rows"], [line.partition(" ")[0] for line in answer["skipped"]]) == (5, ["1.png", "4.jpg"])
    assert told.err.count("skipped ") == 2
    assert json.loads(out.with_suffix(".ids.json").read_text()) == ["0.png", "2.png", "3.png", "4.png", "5.png"]


@pytest.mark.parametrize("shape", [(40, 12), (12, 31), (25, 30), (12, 12), (13, 12)])
def test_export_and_run_agree_on_every_shape(run, tmp_path, shape):
    out = run.parent.parent / "onnx"
    if not out.exists():
        assert main(["export", str(run), "--to", "onnx", "--out", str(out)]) == 0
    rows = np.linspace(0, 1, shape[0])[:, None, None] * np.array([1, 0, 0.3])
    columns = np.linspace(1, 0, shape[1])[None, :, None] * np.array([0, 1, 0.7])
    (tmp_path / "x.png").write_bytes(png(np.uint8(255 * (rows + columns).clip(0, 1))))
    _, adapter, _ = load_run(RunFolder(run), "cpu")
    found = []
    for embedder in (adapter.embedder(), open_folder(out, CPU, None)):
        (row,) = (image for _, image in embedder.read(str(tmp_path / "x.png")).rows)
        found.append(embedder.vectors([row]))
    stored = torch.from_numpy(np.array(Image.open(tmp_path / "x.png").convert("RGB"))).permute(2, 0, 1)[None]
    found.append(adapter.evaluation.extract(adapter.module, adapter.module.features, stored))
    for other in found[1:]:
        assert torch.nn.functional.cosine_similarity(found[0], other).item() > 0.9999


def bomb(mode, kind, **options):
    data = io.BytesIO()
    Image.new(mode, (9000, 9000)).save(data, kind, **options)
    return data.getvalue()


@pytest.mark.parametrize(
    ("mode", "kind", "options"),
    [("1", "PNG", {}), ("L", "PNG", {}), ("1", "TIFF", {"compression": "group4"}), ("P", "GIF", {})],
)
def test_a_small_file_of_a_huge_picture_is_refused(mode, kind, options):
    data = bomb(mode, kind, **options)
    with pytest.raises(ValueError, match=r"9000 x 9000 pixels in .* would take gigabytes"):
        open_rgb(data)


def test_images_of_five_channels_train_and_embed(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 5), dtype=np.uint8)
    path = tmp_path / "five.npz"
    np.savez(path, images=pixels, labels=np.arange(40) % 4)
    data = {"source": str(path)}
    adapter = make_adapter({"data": data, "encoder": {"width": 4, "dim": 8}}, 8)
    batch = next(iter(adapter.batches(0)))
    assert batch.views[0].shape == (8, 5, 8, 8)
    adapter.embed(batch)
    rows = [image for _, image in adapter.embedder().read(str(path)).rows]
    assert torch.equal(rows[7], torch.from_numpy(pixels[7]).permute(2, 0, 1))
    assert adapter.embedder().vectors(rows).isfinite().all()
    np.savez(path, images=pixels.transpose(0, 3, 1, 2)[:, :3])
    with pytest.raises(DataError, match="channels first"):
        load(DataConfig(**data), Seeds(0))


@pytest.mark.parametrize("encoder", ["linear", "alexnet"])
def test_an_encoder_of_one_size_is_refused_with_small_crops(encoder):
    swav = {"small_views": 2, "small_size": 20}
    table = {"method": "swav", "encoder": {"name": encoder}, "swav": swav, "augment": {"size": 32}}
    with pytest.raises(ConfigError, match=rf"'{encoder}' reads images of 32 pixels alone, and views .* also have 20"):
        make_adapter(table, 8)
    with pytest.raises(ConfigError, match="small_views = 0"):
        type(make_adapter({}, 8)).sketch(configured(table), 8)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"method": "moco"}, "vision.negatives: the queue has 65536 rows, and there are"),
        ({"method": "nnclr"}, "vision.nnclr.support: the queue has 98304 rows"),
        ({"method": "swav", "negatives": 5000}, "vision.negatives: the queue has 5000 rows"),
        ({"method": "moco", "negatives": 512}, None),
        ({"method": "nnclr", "nnclr": {"support": 64}}, None),
    ],
)
def test_a_queue_longer_than_the_data_is_named(table, said):
    found = [line for line in make_adapter(table, 8).remarks() if "queue" in line]
    assert len(found) == (said is not None)
    assert not found or said in found[0]


def test_code_in_a_folder_is_refused_without_a_question(tmp_path):
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text("raise SystemExit('was run')")
    with pytest.raises(ValueError, match="foreign code is not run"):
        make_adapter({"encoder": {"name": f"hub:{tmp_path}"}}, 8)
