"""The features of the probes as an ONNX file: pixels in [0, 1] to features, for any number of images."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dipole.core.train.exports import FILE, OUTPUT, Card, write_onnx
from dipole.vision.encoders.hub import write_processor
from dipole.vision.export import TrainedModel
from dipole.vision.frameworks.base import Framework

INPUT = "pixel_values"


class Features(nn.Module):
    """The features of a framework, of both encoders if it has two."""

    def __init__(self, framework: Framework) -> None:
        super().__init__()
        self.framework = framework

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.framework.features(pixel_values)


def export(model: TrainedModel, folder: Path, record: Any, objective: Any) -> Card:
    """Write model.onnx and an image processor. onnxruntime must give the run's features."""
    channels, size = model.channels, model.size
    tried = [{INPUT: torch.rand(count, channels, size, size)} for count in (3, 1, 5)]
    write_onnx(folder, Features(model.module).eval(), tried, {INPUT: ("batch",)})
    write_processor(folder, size, channels)
    usage = f"""
import numpy, onnxruntime

session = onnxruntime.InferenceSession("FOLDER/{FILE}")
pixels = numpy.zeros((2, {channels}, {size}, {size}), "float32")  # in [0, 1]
({OUTPUT},) = session.run(None, {{"{INPUT}": pixels}})
"""
    what = f"An image encoder ({model.config.encoder.name}, method {model.config.method}) as ONNX."
    notes = "Mean and standard deviation of the training images are part of the graph."
    return Card(what, usage, "image-feature-extraction", "onnx", ("vision", "onnx"), notes)
