"""`dipole embed` of every training source, with broken files, huge pictures, any shape and any number of channels."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dipole.core.cli import main
from dipole.core.train.run_folder import RunFolder
from dipole.core.train.trained_run import load_run
from dipole.core.utils.errors import ConfigError, DataError
from dipole.core.utils.pictures import open_rgb
from dipole.core.utils.seeding import Seeds
from dipole.vision.data import DataConfig, load
from dipole.vision.exported import open_folder
from dipole.vision.inference import read_images
from tests.vision.made import CPU, colour_file, configured, image_table, make_adapter, png, tar

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


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    data = colour_file(runs, 12)["source"]
    settings = ["train.steps=1", "train.epochs=", "train.batch_size=8", "vision.encoder.width=4"]
    settings.append(f"vision.data.source={data}")
    arguments = ["train", "digits-simclr", "--quiet", "--runs", str(runs / "runs")]
    assert main([*arguments, *(word for each in settings for word in ("--set", each))]) == 0
    return str(next((runs / "runs").iterdir()))


def test_broken_files_are_refused_or_skipped_and_listed(trained, tmp_path, capsys):
    source = saved(tmp_path, "folder")
    (tmp_path / "1.png").write_bytes(png(PIXELS[1])[:60])
    (tmp_path / "4.jpg").write_text("no picture")
    out = tmp_path / "features.npy"
    assert main(["embed", trained, source, "-o", str(out)]) == 1
    assert "--on-corrupt skip" in capsys.readouterr().err
    assert main(["embed", trained, source, "-o", str(out), "--on-corrupt", "skip", "--json", "--quiet"]) == 0
    told = capsys.readouterr()
    answer = json.loads(told.out)
    assert (answer["rows"], [line.partition(" ")[0] for line in answer["skipped"]]) == (5, ["1.png", "4.jpg"])
    assert told.err.count("skipped ") == 2
    assert json.loads(out.with_suffix(".ids.json").read_text()) == ["0.png", "2.png", "3.png", "4.png", "5.png"]


@pytest.mark.parametrize("shape", [(40, 12), (12, 31), (25, 30), (12, 12), (13, 12)])
def test_export_and_run_agree_on_every_shape(trained, tmp_path, shape):
    out = Path(trained).parent.parent / "onnx"
    if not out.exists():
        assert main(["export", trained, "--to", "onnx", "--out", str(out)]) == 0
    rows = np.linspace(0, 1, shape[0])[:, None, None] * np.array([1, 0, 0.3])
    columns = np.linspace(1, 0, shape[1])[None, :, None] * np.array([0, 1, 0.7])
    (tmp_path / "x.png").write_bytes(png(np.uint8(255 * (rows + columns).clip(0, 1))))
    _, adapter, _ = load_run(RunFolder(Path(trained)), "cpu")
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
