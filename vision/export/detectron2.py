"""A trained ResNet as detectron2's backbone, with the configurations for PASCAL VOC and COCO (CACR Table 5)."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from dipole.core.train.exports import Card
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.text import counted
from dipole.vision.encoders import Encoder
from dipole.vision.encoders.networks import ResNetEncoder
from dipole.vision.export import TrainedModel

# NAME.yaml has the settings of He et al. (2020) for an R50-C4 backbone. CACR App. C.2 trains on COCO for schedule "1x".
TASKS = ("voc", "coco")
NOTES = """\
The settings are those of He et al. (2020) for a C4 backbone, which CACR Table 5 follows. Their head adds a batch norm
after res5 (`Res5ROIHeadsExtraNorm`, which MoCo's own train_net.py registers); the files name detectron2's own
`Res5ROIHeads`. The pixel mean and standard deviation are those the encoder was trained with.
"""
NORM = ("weight", "bias", "running_mean", "running_var")


def backbone(encoder: Encoder) -> dict[str, np.ndarray]:
    """Return the weights of a ResNet under detectron2's names: stem.conv1.weight, res2.0.conv1.norm.bias, ..."""
    if not isinstance(encoder, ResNetEncoder):
        raise ConfigError(
            f"detectron2 has no backbone like {type(encoder).__name__}; export a run whose vision.encoder.name is "
            "resnet18 or resnet50."
        )
    config = encoder.model.config
    if encoder.stem != "imagenet" or config.num_channels != 3:
        raise ConfigError(
            f"detectron2's ResNet has a 7x7 stem for colour images, this encoder the stem {encoder.stem!r} for "
            f"{counted(config.num_channels, 'channel')}; export a run with vision.encoder.stem = 'imagenet' on colour "
            "images."
        )
    found: dict[str, np.ndarray] = {}
    for stage, number, place, layer in encoder.layers():
        name = f"conv{place}" if place else "shortcut"
        name = f"res{stage + 1}.{number}.{name}" if stage else f"stem.{name}"
        found[f"{name}.weight"] = layer.convolution.weight.detach().cpu().numpy()
        for part in NORM:
            found[f"{name}.norm.{part}"] = getattr(layer.normalization, part).detach().cpu().numpy()
    return found


def export(model: TrainedModel, folder: Path, record: Any, objective: Any) -> Card:
    """Write backbone.pkl, voc.yaml and coco.yaml of the run's encoder."""
    encoder = model.module.trained_encoder()
    with open(folder / "backbone.pkl", "wb") as file:
        pickle.dump({"model": backbone(encoder), "__author__": "dipole", "matching_heuristics": True}, file)
    network = {"depth": 50, "res2": 256} if model.config.encoder.name == "resnet50" else {"depth": 18, "res2": 64}
    mean, std = ([f"{255 * value:.3f}" for value in encoder.get_buffer(name).tolist()] for name in ("mean", "std"))
    for task in TASKS:
        text = Path(__file__).with_name(f"{task}.yaml").read_text(encoding="utf-8")
        settings = text.format(**network, mean=", ".join(mean), std=", ".join(std))
        (folder / f"{task}.yaml").write_text(settings, encoding="utf-8")
    usage = """
# in this folder, with detectron2's train_net.py
train_net.py --config-file voc.yaml --num-gpus 8
train_net.py --config-file coco.yaml --num-gpus 8
"""
    what = f"{model.config.encoder.name} as a detectron2 backbone: `backbone.pkl` holds its arrays under their names."
    return Card(what, usage, "object-detection", "detectron2", ("vision",), NOTES)
