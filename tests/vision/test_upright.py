"""The orientation tag of photos: every entrance reads them as viewers show them."""

import io

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

from dipole.vision.decoding import decode
from dipole.vision.inference import read_images
from dipole.vision.pairs.columns import read_pairs
from dipole.vision.sources import Decoding, open_source
from tests.vision.made import image_table, png, tar

UPRIGHT = np.kron(np.random.default_rng(0).integers(0, 256, (2, 3, 3)), np.ones((8, 8, 1))).astype(np.uint8)
STORED = {  # the corner in which EXIF's table says that row 0 and column 0 are
    1: UPRIGHT,
    2: UPRIGHT[:, ::-1],
    3: UPRIGHT[::-1, ::-1],
    4: UPRIGHT[::-1],
    5: UPRIGHT.swapaxes(0, 1),
    6: np.rot90(UPRIGHT),
    7: UPRIGHT[::-1, ::-1].swapaxes(0, 1),
    8: np.rot90(UPRIGHT, -1),
}


def photo(tag=6, kind="PNG", pixels=None):
    """The bytes of a file that stores its pixels turned, with the tag that says so."""
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


def test_other_ways_to_say_it():
    deep = photo(pixels=np.rot90(UPRIGHT[..., 0].astype(np.uint16) * 257))
    assert (decode(deep, None) == UPRIGHT[..., :1]).all()
    told = PngImagePlugin.PngInfo()
    told.add_itxt("XML:com.adobe.xmp", '<rdf:Description tiff:Orientation="6"/>')
    written = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(STORED[6])).save(written, "PNG", pnginfo=told)
    assert (decode(written.getvalue(), None) == UPRIGHT).all()


@pytest.mark.parametrize("exif", [b"", b"Exif\0\0nonsense", b"Exif\0\0II*\0\x08\0\0\0\xff\xff", b"MM"])
def test_damaged_exif_costs_no_picture(exif):
    written = io.BytesIO()
    Image.fromarray(UPRIGHT).save(written, "JPEG", quality=100, exif=exif)
    assert decode(written.getvalue(), None).shape == UPRIGHT.shape


def folder(path):
    (path / "a").mkdir()
    (path / "a" / "0.jpg").write_bytes(photo(6))
    (path / "a" / "1.png").write_bytes(png(UPRIGHT))
    return str(path)


def parquet(path):
    pytest.importorskip("datasets")
    image_table([photo(8), png(UPRIGHT)]).to_parquet(path / "x.parquet")
    return str(path / "x.parquet")


def saved(path):
    image_table([photo(8), png(UPRIGHT)]).save_to_disk(path / "saved")
    return str(path / "saved")


def shards(path):
    tar(path / "a.tar", [("0.png", photo(3)), ("1.png", png(UPRIGHT))])
    return f"wds:{path}/a.tar"


@pytest.mark.parametrize("make", [folder, parquet, saved, shards])
@pytest.mark.parametrize("memory", [4e9, 1])
def test_every_source(tmp_path, monkeypatch, make, memory):
    monkeypatch.setenv("DIPOLE_CACHE", str(tmp_path / "cache"))
    images = open_source(make(tmp_path), Decoding(12, memory=memory)).read("train").images
    turned, plain = images[torch.arange(2)]
    assert torch.equal(turned, plain)
    if not isinstance(images, torch.Tensor):
        shapes = []

        def place(place, height, width):
            shapes.append((height, width))
            return [(0, 0, 4, 4)]

        images.crops(torch.arange(2), place, [4])
        assert shapes == [UPRIGHT.shape[:2]] * 2


def test_folders_of_one_size_embedding_and_pairs(tmp_path):
    folder(tmp_path)
    turned, plain = open_source(str(tmp_path), Decoding()).read("train").images
    assert torch.equal(turned, plain)
    (_, turned), (_, plain) = read_images(str(tmp_path / "a"), None, None, 3).rows
    assert torch.equal(turned, plain)
    (tmp_path / "pairs.csv").write_text("image,other\na/0.jpg,a/1.png\n")
    pairs = read_pairs(str(tmp_path / "pairs.csv"), ["image", "other"], False, Decoding())
    assert torch.equal(*(column[0] for column in pairs.columns))
