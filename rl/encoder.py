"""The pixel encoder of SAC-AE and CURL: four convolutions, a linear layer, layer normalisation."""

import itertools
from typing import Any

import torch
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import Tensor, nn

from dipole.core.contrast.evaluate import autocast_enabled
from dipole.core.ground.errors import ConfigError

Maps = tuple[Tensor, ...]
"""Images or feature maps in chunks of rows, (b, channels, height, width) each."""


class PixelEncoder(BaseFeaturesExtractor):
    """Conv 3x3/2, then 3x3/1, ReLU after each, Linear, LayerNorm (SAC-AE; CURL never applies the tanh).

    Split in `convolve` and `head`, because the actor shares the convolutions of the critic but has a head of its own,
    and because the actor's loss stops between the two.

    Args:
        observation_space: Box (C, H, W) uint8, as rendered; larger images than `image_size` are cut to their middle.
        features_dim: width of the embedding.
        image_size: height and width of what the convolutions see.
        layers, filters: number and channels of the convolutions.
        tanh: apply tanh to the embedding.
        channels_last: memory layout of the convolutions.
        chunk: rows at once on the CPU (0: all). The allocator hands out blocks of more than 32 MB as fresh pages, each
            of which faults: at batch 512 that is half of the time. The values do not depend on it.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        features_dim: int = 50,
        image_size: int = 84,
        layers: int = 4,
        filters: int = 32,
        tanh: bool = False,
        channels_last: bool = True,
        chunk: int = 64,
    ) -> None:
        super().__init__(observation_space, features_dim)
        assert isinstance(observation_space, spaces.Box)
        self.image_size = image_size
        self.tanh = tanh
        self.chunk = chunk
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        extent = (image_size - 3) // 2 + 1 - 2 * (layers - 1)
        if extent < 1:
            raise ConfigError(f"images of {image_size} pixels are too small for {layers} convolutions of 3x3.")
        channels = [observation_space.shape[0], *[filters] * layers]
        self.convs = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride=1 if index else 2)
            for index, (before, after) in enumerate(itertools.pairwise(channels))
        )
        self.fc = nn.Linear(filters * extent * extent, features_dim)
        self.ln = nn.LayerNorm(features_dim)
        self.apply(initialise)

    def prepare(self, images: Tensor) -> Maps:
        """Images (B, C, size, size) with values 0..255 -> chunks of rows with values 0..1, as the convolutions want."""
        dtype = self.fc.weight.dtype
        if autocast_enabled(images.device.type):
            dtype = torch.get_autocast_dtype(images.device.type)
        chunk = self.chunk if self.chunk and images.device.type == "cpu" else len(images)
        # The layout is changed while a pixel is still one byte. The copy keeps images that are floats as they are.
        parts = (part.contiguous(memory_format=self.format) for part in images.split(chunk))
        return tuple(part.to(dtype, copy=True).div_(255) for part in parts)

    def convolve(self, images: Tensor | Maps) -> Maps:
        """Images, or what `prepare` made of them -> feature maps (b, filters, extent, extent) of each chunk of rows."""
        found = []
        for x in self.prepare(images) if isinstance(images, Tensor) else images:
            for conv in self.convs:
                x = torch.relu_(conv(x))
            found.append(x)
        return tuple(found)

    def head(self, maps: Maps) -> Tensor:
        """Feature maps of every chunk -> embedding (B, features_dim), in the parameters' precision."""
        weight = self.fc.weight
        if self.format == torch.channels_last:
            # The maps lie in memory as (b, row, column, filter): one permutation of the weight spares one of each map.
            weight = weight.unflatten(1, maps[0].shape[1:]).permute(0, 2, 3, 1).flatten(1)
            maps = tuple(each.permute(0, 2, 3, 1) for each in maps)
        weight = weight.to(maps[0].dtype)
        z = torch.cat([nn.functional.linear(each.flatten(1), weight, self.fc.bias) for each in maps])
        z = self.ln(z.to(self.ln.weight.dtype))
        return torch.tanh(z) if self.tanh else z

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.convolve(self.centre(images)))

    def centre(self, images: Tensor) -> Tensor:
        """Cut larger images to their middle."""
        top, left = ((extent - self.image_size) // 2 for extent in images.shape[-2:])
        return images[..., top : top + self.image_size, left : left + self.image_size]


def detached(maps: Maps) -> Maps:
    """The same maps, through which no gradient goes."""
    return tuple(each.detach() for each in maps)


def initialise(module: nn.Module) -> None:
    """Orthogonal linear layers, delta-orthogonal convolutions (Xiao et al. 2018), zero biases, as SAC-AE and CURL."""
    if isinstance(module, nn.Linear):
        nn.init.orthogonal_(module.weight)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Conv2d):
        nn.init.zeros_(module.weight)
        nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        middle = module.weight.shape[2] // 2
        gain = nn.init.calculate_gain("relu")
        with torch.no_grad():
            # In place on the slice: orthogonal_ itself wants a contiguous matrix.
            module.weight[:, :, middle, middle] = nn.init.orthogonal_(torch.empty(module.weight.shape[:2]), gain)
