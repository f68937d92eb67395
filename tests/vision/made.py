"""Shared by the vision tests: adapters, frameworks of random images, image files, and steps on several ranks."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from dipole import objective
from dipole.core.train.config import TrainConfig
from dipole.core.train.memory_saving import PatchedEncoders
from dipole.core.utils.seeding import Seeds, seed_everything
from dipole.vision.adapter import VisionAdapter
from dipole.vision.config import VisionConfig
from dipole.vision.frameworks.base import Batch, Branch, Setup
from dipole.vision.image_set import ImageSet
from dipole.vision.inference import ImageEmbedder
from dipole.vision.sources import Decoding, open_source

CPU = torch.device("cpu")
QUICK = [
    "vision.encoder.width=4", "vision.probe.probes=['knn']", "vision.probe.baselines=false",
    "vision.data.train_share=0.9"
]  # fmt: skip
ONE_STEP = [*QUICK, "train.epochs=", "train.steps=1"]
SHORT_RUN = [*QUICK, "train.epochs=2", "train.batch_size=128", "train.log_every=1"]


def configured(table):
    """The [vision] table as a recipe gives it."""
    return VisionConfig.model_validate_json(json.dumps(table))


def make_adapter(table, batch_size=16, seed=0, weights=None, **context):
    """An adapter of a [vision] table, or of its configuration, whose networks are drawn by a seed."""
    config = table if isinstance(table, VisionConfig) else configured(table)
    seed_everything(seed if weights is None else weights)
    context = {"device": CPU, "workdir": Path(), **context}
    return VisionAdapter(config, seed=Seeds(seed), batch_size=batch_size, **context)


def random_framework(table, images=12, side=4, total=60, dtype=torch.float64):
    """A framework for random colour images of three classes, and a batch of its views."""
    config = configured(table)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (total, 3, side, side), dtype=torch.uint8, generator=generator)
    known = ImageSet("random", pixels, torch.arange(total) % 3)
    seed_everything(1)
    module = config.framework.from_config(config, Setup(known, side, images, config.encoder)).to(dtype)
    sides = [augment.size or side for augment in config.framework.augmentations(config)]
    views = [torch.rand(images, 3, each, each, dtype=dtype, generator=generator) for each in sides]
    rows = torch.randperm(total, generator=generator)[:images]
    return module, Batch(views, torch.arange(images) // 2 % 3, rows, seed=7)


def part_of(batch, own):
    """The part of a batch that one rank has."""
    return Batch([view[own] for view in batch.views], batch.labels[own], batch.rows[own], batch.seed)


def encoded_batch(module, batch, **train):
    """The rows of a batch, with the settings that save memory."""
    branches = [part for part in module.modules() if isinstance(part, Branch)]
    with PatchedEncoders(branches, TrainConfig(steps=1, **train), compiles=False)():
        return module.embed(batch)


def step(module, batch, text="infonce", **train):
    """Loss, gradients and buffers after a step."""
    loss = objective(text)(encoded_batch(module, batch, **train)).loss
    loss.backward()
    module.after_step()
    gradients = {name: each.grad for name, each in module.named_parameters()}
    return {"loss": loss.detach(), "gradients": gradients, "buffers": dict(module.named_buffers())}


def colour_file(folder, side=10, count=80):
    """Random colour images of four classes in an .npz, as settings of [vision.data]."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    path = Path(folder) / "colour.npz"
    np.savez(path, images=pixels, labels=np.arange(count) % 4)
    return {"source": str(path), "test": str(path)}


def unlabelled_file(folder):
    """Random grey images without labels in an .npz, as settings of [vision.data]."""
    path = Path(folder) / "u.npz"
    np.savez(path, images=np.random.default_rng(0).integers(0, 256, (64, 8, 8), dtype=np.uint8))
    return {"source": str(path)}


def png(pixels):
    """The bytes of an image: an array (H, W, 3), or a seed of one of 10 x 14 pixels."""
    if isinstance(pixels, int):
        pixels = np.random.default_rng(pixels).integers(0, 256, (10, 14, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def tar(path, members, mode="w"):
    """Write a tar file of pairs of a name and its content."""
    with tarfile.open(path, mode) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def image_folder(root, *places, count=4, suffix=".png"):
    """Image files of 12 x 12 pixels in folders of a folder: file i of folder c has the value 60 c + i."""
    for c, place in enumerate(places):
        (root / place).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            Image.new("RGB", (12, 12), ((60 * c + i) % 256,) * 3).save(root / place / f"{i}{suffix}")
    return root


def image_table(contents, **columns):
    """A data set of `datasets`: a column `image` of encoded images, and further columns."""
    import datasets  # a second, which no rank of a test needs

    cells = [{"bytes": content, "path": None} for content in contents]
    return datasets.Dataset.from_dict({"image": cells, **columns}).cast_column("image", datasets.Image())


def source_of(kind, folder, contents):
    """Write encoded images as a folder, shards, a parquet file or a saved data set, and return the source."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{number:03}.png" for number, _ in enumerate(contents)]
    if kind == "folder":
        for name, content in zip(names, contents, strict=True):
            (folder / name).write_bytes(content)
        return str(folder)
    if kind == "shards":
        tar(folder / "a.tar", zip(names, contents, strict=True))
        return f"wds:{folder}/a.tar"
    if kind == "parquet":
        image_table(contents).to_parquet(folder / "x.parquet")
        return str(folder / "x.parquet")
    image_table(contents).save_to_disk(folder / "saved")
    return str(folder / "saved")


def opened(source, split="train", **options):
    """The images of a split of a source, decoded as the options say."""
    return open_source(str(source), Decoding(**options)).read(split)


def read_images(source, column=None, decoded=None, channels=3, size=None):
    """Names and images of a source, as a model reads them."""
    return ImageEmbedder(len, channels, decoded, size).read(str(source), column)


def python2(value):
    """The opcodes by which Python 2 pickles texts, small numbers, lists, dictionaries and an array of bytes."""
    if isinstance(value, np.ndarray):
        rows, columns = (b"J" + side.to_bytes(4, "little") for side in value.shape)
        return (b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0tU\1btR(K\1(" + rows + columns +
                b"tcnumpy\ndtype\n(U\2u1K\0K\1tR(K\3U\1|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89" +
                python2(value.tobytes()) + b"tb")  # fmt: skip
    if isinstance(value, bytes):
        return b"T" + len(value).to_bytes(4, "little") + value
    if isinstance(value, dict):
        return b"}(" + b"".join(python2(key) + python2(each) for key, each in value.items()) + b"u"
    return b"](" + b"".join(map(python2, value)) + b"e" if isinstance(value, list) else b"K" + bytes([value])
