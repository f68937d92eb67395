"""Crops of stored images, other bit depths, turned photos, and messages before training."""

import io
import math
import struct
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin, features
from scipy.stats import ks_2samp
from torch.nn.functional import interpolate

from dipole.core.train.run_folder import RunFolder
from dipole.core.utils.errors import DataError, RecordError
from dipole.core.utils.seeding import Seeds
from dipole.vision import augment as A
from dipole.vision.augment import random_views
from dipole.vision.data import DataConfig, load
from dipole.vision.decoding import Encoded, decode
from dipole.vision.pairs import read_pairs
from dipole.vision.sources import Decoding, open_source
from tests.runs import refused, run_of
from tests.vision.made import ONE_STEP, image_folder, make_adapter, opened, png, read_images, source_of

PLAIN = {"flip": 0.0, "jitter": 0.0, "grey": 0.0}


def encoded(pictures, size):
    contents = [png(picture) for picture in pictures]
    names = [str(number) for number in range(len(contents))]
    return Encoded(names, contents.__getitem__, torch.arange(len(contents)), size)


def triangle(picture, box, size):
    """Crop and resize in float64: the mean of the box's pixels under a triangle as wide as the scale."""
    left, upper, right, lower = box
    crop = torch.from_numpy(picture[upper:lower, left:right]).double().permute(2, 0, 1)[None]
    return interpolate(crop, (size, size), mode="bilinear", antialias=True)[0]


def test_crops_are_cut_from_the_whole_image():
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, shape, dtype=np.uint8) for shape in ((30, 50, 3), (61, 22, 3), (17, 17, 3))]
    boxes = [[(40, 3, 50, 28), (0, 0, 50, 30)], [(1, 2, 9, 60), (2, 30, 20, 40)], [(0, 0, 4, 4), (5, 6, 17, 17)]]
    augment = A.Augmentation(A.AugmentConfig())
    augment.boxes = lambda box, *_: torch.tensor([[box[1], box[0], box[3] - box[1], box[2] - box[0]]])

    def cut(number, picture):
        assert (picture.height, picture.width) == pictures[number].shape[:2]
        return [augment.cut(picture, box, size) for box, size in zip(boxes[number], (8, 6), strict=True)]

    first, second = encoded(pictures, 8).views(torch.arange(3), cut)
    for n, picture in enumerate(pictures):
        for view, box, size in ((first, boxes[n][0], 8), (second, boxes[n][1], 6)):
            torch.testing.assert_close(view[n].double(), triangle(picture, box, size), atol=1.01, rtol=0)


def loop(height, width, scale, ratio, rng):
    """Inception's crop in plain numbers, as torchvision documents it."""
    for _ in range(10):
        area = height * width * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return rng.integers(0, height - h + 1), rng.integers(0, width - w + 1), h, w
    inside = width / height
    if inside < ratio[0]:
        w, h = width, round(width / ratio[0])
    elif inside > ratio[1]:
        w, h = round(height * ratio[1]), height
    else:
        w, h = width, height
    return (height - h) // 2, (width - w) // 2, h, w


@pytest.mark.parametrize(("height", "width"), [(300, 500), (500, 120), (60, 64), (10, 200)])
def test_boxes_on_the_original_are_distributed_as_a_loops(height, width):
    augment, n = A.Augmentation(A.AugmentConfig(crop_scale=(0.08, 1.0))), 4000
    _, draws = augment.draw_unsized(n, torch.Generator().manual_seed(0), 32)
    one_by_one = torch.cat([augment.boxes(draws[i : i + 1], height, width) for i in range(50)])
    ours = augment.boxes(draws, height, width)
    assert torch.equal(one_by_one, ours[:50])
    rng = np.random.default_rng(1)
    theirs = np.array([loop(height, width, (0.08, 1.0), (3 / 4, 4 / 3), rng) for _ in range(n)], dtype=float)
    top, left, h, w = ours.double().numpy().T
    assert ((top >= 0) & (left >= 0) & (h >= 1) & (w >= 1) & (top + h <= height) & (left + w <= width)).all()
    for a, b in ((h * w, theirs[:, 2] * theirs[:, 3]), (w / h, theirs[:, 3] / theirs[:, 2]), (top, theirs[:, 0])):
        assert ks_2samp(a, b).pvalue > 1e-3
    assert ks_2samp(left, theirs[:, 1]).pvalue > 1e-3


def test_views_of_a_whole_image_equal_those_in_memory():
    """If the stored image is the square itself, both ways give the same crops up to rounding to 8 bits."""
    pictures = np.random.default_rng(0).integers(0, 256, (6, 24, 24, 3), dtype=np.uint8)
    stacked = torch.from_numpy(pictures).permute(0, 3, 1, 2)
    recipes = [A.AugmentConfig(size=12), A.AugmentConfig(size=8, crop_scale=(0.1, 0.4), **PLAIN)]
    index, cpu = torch.tensor([4, 1, 0, 5]), torch.device("cpu")
    generators = [torch.Generator().manual_seed(3) for _ in range(3)]
    ours = random_views(encoded(pictures, 24), index, recipes, generators[0], cpu)
    memory = random_views(stacked, index, recipes, generators[1], cpu)
    assert (ours[1] - memory[1]).abs().max() <= 1.01 / 255
    assert (ours[0] - memory[0]).abs().mean() < 0.01
    part = random_views(encoded(pictures, 24), index, recipes, generators[2], cpu, slice(2, 4))
    assert all(torch.equal(a[2:], b) for a, b in zip(ours, part, strict=True))


def test_training_sees_what_a_centred_square_would_not(tmp_path):
    """Wide images whose margins alone are white: no square of the middle holds a white pixel."""
    picture = np.zeros((16, 64, 3), np.uint8)
    picture[:, :20], picture[:, -20:] = 255, 255
    for file in image_folder(tmp_path, "a", "b", count=8).rglob("*.png"):
        Image.fromarray(picture).save(file)
    table = {"data": {"source": str(tmp_path), "size": 16, "memory": 1e-9}, "augment": {"size": 8, **PLAIN}}
    adapter = make_adapter(table | {"encoder": {"name": "small-conv", "width": 4}}, 8)
    assert next(iter(adapter.batches(0))).views[0].amax((1, 2, 3)).max() == 1
    assert adapter.parts.train.images[torch.arange(4)].max() == 0  # probes see the middle


def saved(tmp_path, name, values):
    Image.fromarray(values).save(tmp_path / name)
    return (tmp_path / name).read_bytes()


RAMP = np.linspace(0, 65535, 64).reshape(8, 8)


@pytest.mark.parametrize(("name", "values", "wanted", "near"), [
    *((name, RAMP.astype(np.uint16), RAMP / 257, 1.01) for name in ("x.png", "x.tif", "x.pgm")),
    ("x.tif", np.float32(RAMP / 65535), RAMP / 257, 0.51),  # floating point pixels lie between 0 and 1
])  # fmt: skip
def test_other_depths_are_scaled(tmp_path, name, values, wanted, near):
    np.testing.assert_allclose(decode(saved(tmp_path, name, values), None)[:, :, 0], wanted, atol=near)


def test_tags_of_a_tiff_say_what_its_numbers_mean_and_what_is_lost_is_said(tmp_path):
    def tag(number, value, kind=3):
        return struct.pack("<HHIH", number, kind, 1, value)

    data = saved(tmp_path, "x.tif", RAMP.astype(np.uint16)).replace(tag(262, 1), tag(262, 0))
    np.testing.assert_allclose(decode(data, None)[:, :, 0], 255 - RAMP / 257, atol=1.01)
    bits = "".join(f"{round(value):012b}" for value in RAMP.ravel() / 65535 * 4095)
    packed = np.packbits(np.array(list(bits), dtype=np.uint8)).reshape(8, 12)
    data = saved(tmp_path, "x.tif", packed).replace(tag(258, 8), tag(258, 12)).replace(tag(256, 12, 4), tag(256, 8, 4))
    np.testing.assert_allclose(decode(data, None)[:, :, 0], RAMP / 257, atol=0.6)
    with pytest.warns(UserWarning, match="numbers of an image with 16 bits end below 4096"):
        decode(saved(tmp_path, "x.png", (RAMP // 16).astype(np.uint16)), None)
    header, pixels = struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0), zlib.compress((b"\0" + b"\x0f\xff" * 24) * 8)
    parts = ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    deep = b"".join(struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts)
    with pytest.warns(UserWarning, match="numbers of an image with 16 bits end below 4096"):
        assert decode(b"\x89PNG\r\n\x1a\n" + deep, None).max() == 15
    Image.new("RGBX", (4, 4)).save(tmp_path / "x.tif")
    with pytest.warns(UserWarning, match="only the first three of the 4 channels of a TIFF"):
        decode((tmp_path / "x.tif").read_bytes(), None)


@pytest.mark.parametrize(("values", "message"), [
    (np.full((4, 4), 90000, np.int32), r"x\.tif \(whole numbers of 32 bits .* do not say"),
    (np.full((4, 4), 200, np.float32), r"numbers go from 200 to 200"),
    (np.full((4, 4), np.nan, np.float32), r"numbers go from nan"),
])  # fmt: skip
def test_values_without_a_white_are_refused(tmp_path, values, message):
    saved(tmp_path, "x.tif", values)
    refused(DataError, message, opened, tmp_path)


@pytest.mark.parametrize("name", ["val", "validation", "VALID", "Testing", "eval"])
def test_val_beside_train_is_the_test_part_unless_there_is_test(tmp_path, name):
    def sizes(**settings):
        parts = load(DataConfig(source=str(tmp_path), **settings), Seeds(0))
        return len(parts.train), len(parts.test)

    for split, count in (("Training" if name == "Testing" else "train", 4), (name, 3)):
        image_folder(tmp_path, f"{split}/cat", f"{split}/dog", count=count)
    assert sizes() == (8, 6)
    image_folder(tmp_path, "test/cat", "test/dog", count=2)
    assert (sizes(), sizes(test_split=name)) == ((8, 4), (8, 6))
    refused(DataError, "has no split 'held'", sizes, test_split="held")


def test_images_that_are_left_out_are_named_once(tmp_path):
    image_folder(tmp_path, "cat", suffix=".jp2")
    image_folder(tmp_path, "dog", suffix=".avif" if features.check("avif") else ".pnm")
    Image.new("RGB", (12, 12)).save(tmp_path / "stray.png")
    (tmp_path / "cat" / "photo.heic").write_bytes(b"x")
    (tmp_path / "bird.lnk").write_bytes(b"L")
    (tmp_path / "notes.txt").write_text("no image")
    with pytest.warns(UserWarning, match=r"3 images .* left out: .*stray\.png .*bird\.lnk .*photo\.heic"):
        images = opened(tmp_path)
    assert (len(images), len(images.broken())) == (8, 3)
    with warnings.catch_warnings(action="error"):
        opened(image_folder(tmp_path / "clean", "cat", "dog"))
    other = image_folder(tmp_path / "other", "cat", "dog", count=8)
    for i in (1, 4):
        for name in ("cat", "dog"):
            (other / name / f"{i}.png").write_bytes(b"no image")
    images = opened(other, size=8, memory=1, on_corrupt="skip")
    with warnings.catch_warnings(record=True, action="always") as said:
        for _ in range(5):
            list(images.images.split(5))
            list(images.take(torch.arange(0, 16, 2)).images.split(3))
    assert len(images.broken()) == len(said) == 4
    assert not any("0x" in name for name in images.broken())


@pytest.mark.parametrize(("place", "probes", "message"), [
    ("", "['kmeans']", r"no image of the test part .* the probes kmeans need"),
    ("cat", "['linear', 'knn']", r"are of one class, cat, and the probes linear, knn need two"), ("", "[]", None),
])  # fmt: skip
def test_labels_that_the_probes_miss_are_said_before_training(tmp_path, place, probes, message):
    image_folder(tmp_path / "x", place, count=24)
    settings = [f"vision.data.source={tmp_path / 'x'}", f"vision.probe.probes={probes}", "train.batch_size=4"]
    if message is None:
        assert run_of("digits-simclr", tmp_path / "runs", *ONE_STEP, *settings).status == "done"
        return
    refused(DataError, message, run_of, "digits-simclr", tmp_path / "runs", *ONE_STEP, *settings)
    assert not list(tmp_path.rglob("checkpoints/*"))


def test_a_damaged_record_beside_checkpoints_does_not_cost_them(tmp_path):
    run = RunFolder(tmp_path)
    run.record.write_text("{")
    refused(RecordError, r"To train this run again: .* --overwrite", run.read_record)
    run.checkpoints.mkdir()
    (run.checkpoints / "step-00000001.0123456789abcdef.pt").write_bytes(b"x")
    refused(RecordError, r"remove .*record\.json and repeat the command to continue", run.read_record)


UPRIGHT = np.kron(np.random.default_rng(0).integers(0, 256, (2, 3, 3)), np.ones((8, 8, 1))).astype(np.uint8)
STORED = {  # the corner in which EXIF's table says that row 0 and column 0 are
    1: UPRIGHT, 2: UPRIGHT[:, ::-1], 3: UPRIGHT[::-1, ::-1], 4: UPRIGHT[::-1], 5: UPRIGHT.swapaxes(0, 1),
    6: np.rot90(UPRIGHT), 7: UPRIGHT[::-1, ::-1].swapaxes(0, 1), 8: np.rot90(UPRIGHT, -1),
}  # fmt: skip


def photo(tag=6, kind="PNG", pixels=None):
    """Return the bytes of a file with turned pixels and their orientation tag."""
    image = Image.fromarray(np.ascontiguousarray(STORED[tag] if pixels is None else pixels))
    exif = Image.Exif()
    exif[0x112] = tag
    written = io.BytesIO()
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}, "MPO": {"quality": 100}}
    image.save(written, kind, exif=exif, **options.get(kind, {}))
    return written.getvalue()


@pytest.mark.parametrize("tag", STORED)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "MPO"])
def test_each_orientation_of_each_format(tag, kind):
    found = decode(photo(tag, kind), None).astype(int)
    assert found.shape == UPRIGHT.shape
    assert np.abs(found - UPRIGHT).mean() < (0.1 if kind in ("PNG", "WEBP", "TIFF") else 8)


def test_other_ways_to_say_it_and_damaged_exif():
    deep = photo(pixels=np.rot90(UPRIGHT[..., 0].astype(np.uint16) * 257))
    assert (decode(deep, None) == UPRIGHT[..., :1]).all()
    told = PngImagePlugin.PngInfo()
    told.add_itxt("XML:com.adobe.xmp", '<rdf:Description tiff:Orientation="6"/>')
    written = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(STORED[6])).save(written, "PNG", pnginfo=told)
    assert (decode(written.getvalue(), None) == UPRIGHT).all()
    for exif in (b"", b"Exif\0\0nonsense", b"Exif\0\0II*\0\x08\0\0\0\xff\xff", b"MM"):
        Image.fromarray(UPRIGHT).save(written := io.BytesIO(), "JPEG", quality=100, exif=exif)
        assert decode(written.getvalue(), None).shape == UPRIGHT.shape


@pytest.mark.parametrize("kind", ["folder", "parquet", "saved", "shards"])
@pytest.mark.parametrize("memory", [4e9, 1])
def test_every_source(tmp_path, monkeypatch, kind, memory):
    monkeypatch.setenv("DIPOLE_CACHE", str(tmp_path / "cache"))
    source = source_of(kind, tmp_path / "a", [photo(6), png(UPRIGHT)])
    images = open_source(source, Decoding(12, memory=memory)).read("train").images
    assert torch.equal(*images[torch.arange(2)])
    if not isinstance(images, torch.Tensor):
        shapes = []
        images.views(torch.arange(2), lambda place, picture: shapes.append(picture.size) or [np.zeros((4, 4, 3))])
        assert shapes == [UPRIGHT.shape[1::-1]] * 2


def test_folders_of_one_size_embedding_and_pairs(tmp_path):
    source_of("folder", tmp_path / "a", [photo(8), png(UPRIGHT)])
    assert torch.equal(*opened(tmp_path).images)
    assert torch.equal(*(image for _, image in read_images(tmp_path / "a").rows))
    (tmp_path / "pairs.csv").write_text("image,other\na/000.png,a/001.png\n")
    pairs = read_pairs(str(tmp_path / "pairs.csv"), ["image", "other"], False, Decoding())
    assert torch.equal(*(column[0] for column in pairs.columns))
