"""Image data sets of the recipes and their authors' downloads. This module imports nothing heavy."""

from dipole.core.train.data_sets import Built, DataSet
from dipole.core.utils.download import RemoteFile

CIFAR = "https://www.cs.toronto.edu/~kriz"
CIFAR_LICENCE = "none is stated; its authors ask for citation (Krizhevsky 2009), images from the web"

# Checksums are from the authors' pages. CIFAR in its binary version: the other is pickles, which could run code.
SETS: dict[str, DataSet | Built] = {
    "cifar10": DataSet(
        "60,000 images of 32 x 32 pixels in 10 classes (Krizhevsky 2009)",
        CIFAR_LICENCE,
        f"{CIFAR}/cifar.html",
        (RemoteFile(f"{CIFAR}/cifar-10-binary.tar.gz", 170_052_171, "md5:c32a1d4ab5d03f1284b67883e8d87530"),),
        "dipole.vision.prepare:cifar10",
        "vision.data.source={folder}/train.npz vision.data.test={folder}/test.npz",
    ),
    "cifar100": DataSet(
        "60,000 images of 32 x 32 pixels in 100 classes (Krizhevsky 2009)",
        CIFAR_LICENCE,
        f"{CIFAR}/cifar.html",
        (RemoteFile(f"{CIFAR}/cifar-100-binary.tar.gz", 168_513_733, "md5:03b5dce01913d631647c71ecec9e9cb8"),),
        "dipole.vision.prepare:cifar100",
        "vision.data.source={folder}/train.npz vision.data.test={folder}/test.npz",
    ),
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
