"""A trained vision model without its images: embedding, and folders that other libraries load."""

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
from dipole.vision.exported import open_folder
from dipole.vision.inference import read_images

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
