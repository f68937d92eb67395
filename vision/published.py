"""Image data sets of the recipes and their authors' downloads. This module imports nothing heavy."""

from dipole.core.train.data_sets import Built, DataSet
from dipole.core.utils.download import RemoteFile

CIFAR = "https://www.cs.toronto.edu/~kriz"


def _cifar(classes: int, size: int, checksum: str) -> DataSet:
    return DataSet(
        f"60,000 images of 32 x 32 pixels in {classes} classes (Krizhevsky 2009)",
        "none is stated; its authors ask for citation (Krizhevsky 2009), images from the web",
        f"{CIFAR}/cifar.html",
        (RemoteFile(f"{CIFAR}/cifar-{classes}-binary.tar.gz", size, checksum),),
        f"dipole.vision.prepare:cifar{classes}",
        "vision.data.source={folder}/train.npz vision.data.test={folder}/test.npz",
    )


# Checksums are from the authors' pages. CIFAR in its binary version: the other is pickles, which could run code.
SETS: dict[str, DataSet | Built] = {
    "cifar10": _cifar(10, 170_052_171, "md5:c32a1d4ab5d03f1284b67883e8d87530"),
    "cifar100": _cifar(100, 168_513_733, "md5:03b5dce01913d631647c71ecec9e9cb8"),
    "stl10": DataSet(
        "113,000 images of 96 x 96 pixels, 13,000 of them in 10 classes (Coates et al. 2011)",
        "none is stated; images from ImageNet, for research",
        "https://cs.stanford.edu/~acoates/stl10/",
        (
            RemoteFile(
                "https://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz",
                2_640_397_119,
                "md5:91f7769df0f17e558f3565bffb0c7dfb",
            ),
        ),
        "dipole.vision.prepare:stl10",
        "vision.data.source={folder}",
    ),
}
