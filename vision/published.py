"""Image data sets of the recipes and their authors' downloads. This module imports nothing heavy."""

from dipole.core.train.data_sets import Built, DataSet
from dipole.core.utils.download import RemoteFile

CIFAR = "https://www.cs.toronto.edu/~kriz"
STL = "https://ai.stanford.edu/~acoates/stl10"


def _cifar(classes: int, size: int, checksum: str, inner: str) -> DataSet:
    return DataSet(
        f"60,000 images of 32 x 32 pixels in {classes} classes (Krizhevsky 2009)",
        "none is stated; its authors ask for citation (Krizhevsky 2009), images from the web",
        f"{CIFAR}/cifar.html",
        (RemoteFile(f"{CIFAR}/cifar-{classes}-python.tar.gz", size, checksum),),
        f"dipole.vision.prepare:cifar{classes}",
        f"vision.data.source={{folder}}/{inner}",
    )


# Checksums are from the authors' pages.
SETS: dict[str, DataSet | Built] = {
    "cifar10": _cifar(10, 170_498_071, "md5:c58f30108f718f92721af3b95e74349a", "cifar-10-batches-py"),
    "cifar100": _cifar(100, 169_001_437, "md5:eb9058c3a382ffc7106e4002c42a8d85", "cifar-100-python"),
    "stl10": DataSet(
        "113,000 images of 96 x 96 pixels, 13,000 of them in 10 classes (Coates et al. 2011)",
        "none is stated; images from ImageNet, for research",
        "https://cs.stanford.edu/~acoates/stl10/",
        (RemoteFile(f"{STL}/stl10_binary.tar.gz", 2_640_397_119, "md5:91f7769df0f17e558f3565bffb0c7dfb"),),
        "dipole.vision.prepare:stl10",
        "vision.data.source={folder}/stl10_binary",
    ),
}
