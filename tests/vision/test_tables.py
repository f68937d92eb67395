"""Tables of images: which columns are read, which values are classes, and cells that are no images."""

import datetime
import warnings
from decimal import Decimal

import numpy as np
import pytest
import torch
from PIL import Image

from dipole.core.utils.errors import DataError
from dipole.core.utils.seeding import Seeds
from dipole.vision.data import DataConfig, load
from dipole.vision.image_set import ImageSet, joined
from dipole.vision.inference import read_images
from dipole.vision.sources import Decoding, open_source
from dipole.vision.sources.labels import class_labels
from tests.vision.made import png

datasets = pytest.importorskip("datasets")
ROWS = 6
IMAGE = datasets.Image()


@pytest.fixture(autouse=True)
def no_warnings(tmp_path, monkeypatch):
    monkeypatch.setenv("DIPOLE_CACHE", str(tmp_path / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def picture(value):
    return {"bytes": png(np.full((8, 8, 3), value, np.uint8)), "path": None}


def table(path, columns, features=None, split="train"):
    """A parquet file of columns of cells. Columns of images are filled: image i has the value `start` + i."""
    columns = {name: [picture(cells + i) for i in range(ROWS)] if isinstance(cells, int) else cells
               for name, cells in columns.items()}  # fmt: skip
    made = datasets.Dataset.from_dict(columns)
    for name, feature in (features or {}).items():
        made = made.cast_column(name, feature)
    path.mkdir(exist_ok=True)
    made.to_parquet(path / f"{split}-00000-of-00001.parquet")
    return path


ENTRANCES = ("parquet", "saved", "stream", "hub")


def read(path, entrance="parquet", split="train", **options):
    """Read a folder of parquet files, or what `datasets` makes of it."""
    source, streaming = str(path), entrance == "stream"
    if entrance == "saved":
        saved = path.with_name(f"{path.name}-saved")
        datasets.load_dataset(str(path)).save_to_disk(saved)
        source = str(saved)
    if entrance in ("stream", "hub"):
        source = f"hub:{path}"
    return open_source(source, Decoding(size=8, streaming=streaming, **options)).read(split)


def first_pixels(images):
    return images.images[torch.arange(len(images))][:, 0, 0, 0].tolist()


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("name", ["image", "img", "Image", "jpg"])
def test_a_column_called_image_wins_over_the_first(tmp_path, entrance, name):
    path = table(tmp_path / "t", {"mask": 0, name: 100}, {"mask": IMAGE, name: IMAGE})
    assert first_pixels(read(path, entrance)) == [100 + i for i in range(ROWS)]
    assert first_pixels(read(path, entrance, image_column="mask")) == list(range(ROWS))
    if entrance == "parquet":
        rows = read_images(str(path), "mask", 8, 3).rows
        assert [int(image[0, 0, 0]) for _, image in rows] == list(range(ROWS))


def test_several_columns_without_such_a_name_are_said(tmp_path):
    path = table(tmp_path / "t", {"left": 0, "right": 100}, {"left": IMAGE, "right": IMAGE})
    with pytest.warns(UserWarning, match=r"left, right. It reads 'left'.*image_column"):
        assert first_pixels(read(path)) == list(range(ROWS))


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_the_columns_of_the_recipe(tmp_path, entrance):
    kind = datasets.ClassLabel(names=["x", "y"])
    path = table(tmp_path / "t", {"image": 0, "photo": 50, "label": [0] * ROWS, "kind": [i % 2 for i in range(ROWS)]},
                 {"image": IMAGE, "photo": IMAGE, "kind": kind})  # fmt: skip
    found = read(path, entrance, image_column="photo", label_column="kind")
    assert (first_pixels(found)[0], found.labels.tolist(), found.class_names) == (50, [0, 1] * 3, ("x", "y"))
    for wrong in ({"image_column": "phto"}, {"label_column": "knd"}):
        with pytest.raises(DataError, match=r"no column '(phto|knd)'.*Did you mean '(photo|kind)'"):
            read(path, entrance, **wrong)
    with pytest.raises(DataError, match=r"'kind' holds int64, not images"):
        read(path, entrance, image_column="kind")


NUMBERS = [0.2, 0.9, 0.2, 1.5, 3.0, 0.1]
MANY = [[0, 1], [1], [], [0], [2], [1]]


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize(
    ("cells", "labels", "names"),
    [
        (["b", "a", "b", None, " ", "c"], [1, 0, 1, -1, -1, 2], ("a", "b", "c")),
        ([1.0, 0.0, None, float("nan"), 2.0, 1.0], [1, 0, -1, -1, 2, 1], ()),
        ([True, False, None, True, True, False], [1, 0, -1, 1, 1, 0], ()),
        (["3", "10", "3", "2", None, "3"], [3, 10, 3, 2, -1, 3], ()),
        ([3, 10, 3, 2, None, 3], [3, 10, 3, 2, -1, 3], ()),
        ([None] * ROWS, None, ()),
    ],
)
def test_values_that_are_classes(tmp_path, entrance, cells, labels, names):
    found = read(table(tmp_path / "t", {"image": 0, "label": cells}, {"image": IMAGE}), entrance)
    assert (None if found.labels is None else found.labels.tolist(), found.class_names) == (labels, names)


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize(
    ("cells", "why"),
    [
        (NUMBERS, r"not whole, such as"),
        ([f"{x}" for x in NUMBERS], r"not whole, such as"),
        (MANY, "holds list values such as"),
        ([[1.0, 0.0]] * ROWS, "holds list values such as"),
        ([["a", "b"]] * ROWS, "holds list values such as"),
        ([{"x": 1}] * ROWS, "holds dict values such as"),
        ([datetime.date(2020, 1, 1)] * ROWS, "holds date values such as 2020-01-01"),
        ([Decimal("1.5")] * ROWS, "holds Decimal values such as"),
        ([b"a", b"b"] * 3, "holds bytes values such as"),
        ([-5, -4, 0, 1, 2, 3], "holds negative numbers such as -[54], and only -1, no label, is allowed"),
    ],
)
def test_values_that_are_no_classes_are_said_and_the_images_read(tmp_path, entrance, cells, why):
    path = table(tmp_path / "t", {"image": 0, "label": cells}, {"image": IMAGE})
    with pytest.warns(UserWarning, match=rf"'label' .*{why}.*label_column"):
        found = read(path, entrance)
    assert (len(found), found.labels) == (ROWS, None)
    with pytest.raises(DataError, match=rf"'label' .*{why}.*label_column"):
        read(path, entrance, label_column="label")


@pytest.mark.parametrize("column", ["Label", "CLASS", "cls"])
def test_names_of_columns_of_labels(tmp_path, column):
    path = table(tmp_path / "t", {"image": 0, "n": list(range(ROWS)), column: ["b", "a"] * 3}, {"image": IMAGE})
    assert read(path).labels.tolist() == [1, 0] * 3


def test_the_next_column_of_classes_is_taken(tmp_path):
    kind = datasets.ClassLabel(names=["x", "y"])
    path = table(tmp_path / "t", {"image": 0, "label": NUMBERS, "kind": [0, 1] * 3}, {"image": IMAGE, "kind": kind})
    with pytest.warns(UserWarning, match="not whole"):
        assert read(path).class_names == ("x", "y")


def test_classes_of_text_have_one_number_in_all_parts(tmp_path):
    path = table(tmp_path / "t", {"image": 0, "label": list("abcabc")}, {"image": IMAGE})
    table(path, {"image": 0, "label": list("ccaaca")}, {"image": IMAGE}, "test")
    parts = load(DataConfig(source=str(path), size=8, train_split="train", pretrain_split="test+train"), Seeds(0))
    assert (parts.train.labels.tolist(), parts.test.labels.tolist()) == ([0, 1, 2] * 2, [2, 2, 0, 0, 2, 0])
    assert parts.pretrain.labels.tolist() == [2, 2, 0, 0, 2, 0, 0, 1, 2, 0, 1, 2]
    table(path, {"image": 0, "label": list("ccaadd")}, {"image": IMAGE}, "test")
    with pytest.raises(DataError, match="only in test: d"):
        load(DataConfig(source=str(path), size=8), Seeds(0))


def test_missing_labels_stay_missing_in_joined_parts():
    pixels = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    one = ImageSet("x", pixels, torch.tensor([1, -1]), ("a", "b"))
    other = ImageSet("x", pixels, torch.tensor([0, -1]), ("b",))
    assert joined([other, one]).labels.tolist() == [1, -1, 1, -1]


@pytest.mark.parametrize("values", [[1e30, float("inf")], [float("-inf")]])
def test_infinite_numbers_are_no_classes(values):
    with pytest.raises(ValueError, match="not whole"):
        class_labels(values)


@pytest.mark.parametrize("entrance", ["parquet", "saved", "stream"])
@pytest.mark.parametrize("cell", [None, {"bytes": None, "path": None}, {"bytes": None, "path": "/nowhere/x.png"}])
def test_cells_without_an_image(tmp_path, entrance, cell):
    cells = [picture(i) for i in range(ROWS)]
    cells[2] = cell
    plain = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    path = table(tmp_path / "t", {"image": cells}, {"image": plain})
    why = "its file /nowhere/x.png" if cell and cell["path"] else "the cell is empty"
    with pytest.raises(DataError, match=rf"\[2\] \({why}.*on_corrupt = 'skip'"):
        first_pixels(read(path, entrance))
    with pytest.warns(UserWarning, match=why):
        assert first_pixels(read(path, entrance, on_corrupt="skip"))[:2] == [0, 1]


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize(
    ("cells", "feature", "fix"),
    [
        (["a/x.png"] * ROWS, None, r"holds text.*table\.cast_column\('image', datasets\.Image\(\)\)"),
        ([[picture(0), picture(1)]] * ROWS, datasets.List(IMAGE), "holds lists of images. Make a row of each image"),
        ([np.zeros((4, 4), np.uint8).tolist()] * ROWS, None, r"holds arrays.*datasets\.Image\(\).*\.npz"),
        ([np.zeros((4, 4, 3), np.uint8)] * ROWS, datasets.Array3D((4, 4, 3), "uint8"), r"holds arrays.*\.npz"),
    ],
)
def test_columns_that_hold_something_else(tmp_path, explicit, cells, feature, fix):
    path = table(tmp_path / "t", {"image": cells, "id": list(range(ROWS))}, {"image": feature} if feature else None)
    with pytest.raises(DataError, match=fix):
        read(path, image_column="image" if explicit else None)


def test_the_advice_for_lists_works(tmp_path):
    warnings.filterwarnings("ignore", "Downcasting array")
    made = datasets.Dataset.from_dict({"image": [np.full((4, 4, 3), i, np.uint8).tolist() for i in range(ROWS)]})
    made.cast_column("image", datasets.Image()).to_parquet(tmp_path / "a.parquet")
    assert first_pixels(read(tmp_path / "a.parquet")) == list(range(ROWS))
    for i in range(ROWS):
        Image.new("RGB", (8, 8), (i,) * 3).save(tmp_path / f"{i}.png")
    made = datasets.Dataset.from_dict({"image": [str(tmp_path / f"{i}.png") for i in range(ROWS)]})
    made.cast_column("image", datasets.Image()).to_parquet(tmp_path / "b.parquet")
    assert first_pixels(read(tmp_path / "b.parquet")) == list(range(ROWS))


def test_a_column_of_bytes_is_read(tmp_path):
    path = table(tmp_path / "t", {"jpg": [picture(i)["bytes"] for i in range(ROWS)]})
    assert first_pixels(read(path)) == list(range(ROWS))


def test_a_file_without_rows(tmp_path):
    path = table(tmp_path / "t", {"image": 0})
    empty = datasets.load_dataset(str(path))["train"].select([])
    empty.to_parquet(path / "train-00001-of-00002.parquet")
    assert len(read(path)) == ROWS
    empty.to_parquet(path / "train-00000-of-00001.parquet")
    with pytest.raises(DataError, match=r"holds no row\. Choose another file"):
        read(path)
