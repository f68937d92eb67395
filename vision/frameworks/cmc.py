"""Contrastive multiview coding: the two halves of Lab through two networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from dipole.core.objectives.embedded import Embedded
from dipole.core.objectives.pairs import Pairs
from dipole.core.train.config import Settings
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.transfer import constant, generator
from dipole.vision.augment import centre
from dipole.vision.encoders import Encoder
from dipole.vision.frameworks.base import Batch, Branch, Build, Method, Related, Setup, instances, register_framework
from dipole.vision.frameworks.queue import of_all_ranks
from dipole.vision.image_set import ImageSet

if TYPE_CHECKING:
    from dipole.vision.config import VisionConfig

SAMPLE = 2000  # images from which the statistics of Lab are taken

# CIE 1976 L*a*b* of sRGB under D65: the matrix to XYZ and the white point (IEC 61966-2-1, CIE 15).
XYZ = ((0.412453, 0.357580, 0.180423), (0.212671, 0.715160, 0.072169), (0.019334, 0.119193, 0.950227))
WHITE = (0.950456, 1.0, 1.088754)


def lab(images: Tensor) -> Tensor:
    """CIE L*a*b* (n, 3, H, W) of RGB in [0, 1]: L in [0, 100], a and b about [-110, 110], each divided by 100."""
    linear = torch.where(images > 0.04045, ((images + 0.055) / 1.055).clamp_min(0) ** 2.4, images / 12.92)
    matrix = constant(XYZ, images) / constant(WHITE, images)[:, None]
    xyz = torch.einsum("ij,njhw->nihw", matrix, linear)
    f = torch.where(xyz > 0.008856, xyz.clamp_min(1e-8) ** (1 / 3), 7.787 * xyz + 16 / 116)
    x, y, z = f.unbind(1)
    return torch.stack([1.16 * y - 0.16, 5 * (x - y), 2 * (y - z)], 1)


class CMCConfig(Settings):
    """The [vision.cmc] table."""

    momentum: float = Field(0.5, ge=0, lt=1, description="of the memory bank")
    width: float = Field(
        0.5, gt=0, le=1, description="of each encoder's layers, as a share of the encoder's; Tian et al.: a half"
    )


@register_framework("cmc")
class CMC(Method):
    """Contrastive multiview coding (Tian et al. 2020): L and ab of one view through two networks, in both directions.

    bank: so many negatives are drawn from a memory bank that holds a running mean of every image's embedding per half
    (bank momentum 0.5), and the positive is the image's own row of the other half's bank, as in the authors' code: were
    it the fresh embedding, both halves could leave the rows of the bank behind together, all images at one point. None
    takes positives and negatives of the batch. Probes see both encoders' features side by side.
    """

    table = CMCConfig
    single = "the two halves of Lab are its two views"
    pairs = ("augmented",)
    negatives_mean = "drawn from a memory bank instead of the batch"
    positives_key = ""

    def __init__(self, build: Build, tap: str | None, images: int, bank: int | None, momentum: float) -> None:
        super().__init__()
        encoder, projector, self.embedding_dim = build(1)
        self.light = Branch(encoder, projector, tap)
        encoder, projector, _ = build(2)
        self.colour = Branch(encoder, projector, tap)
        self.bank = bank
        self.momentum = momentum
        if bank is not None:
            self.register_buffer("memory", F.normalize(torch.randn(2, images, self.embedding_dim), dim=2))
        self._fresh: tuple[Tensor, Tensor, Tensor] | None = None

    @classmethod
    def from_config(cls, config: VisionConfig, setup: Setup) -> Self:
        images, table = setup.images, config.own_table
        cls.check_images(images)
        bank, most = config.negatives, len(images) - setup.batch_size
        if bank is not None and bank > most:
            raise ConfigError(
                f"vision.negatives: {bank} of a memory bank and a batch of {setup.batch_size} are more than the "
                f"{len(images)} images of {images.name}; give at most {most}."
            )
        build = partial(setup.build, share=table.width)
        cmc = cls(build, config.encoder.tap, len(images), bank, table.momentum)
        cmc.set_statistics(centre(images.images[slice(SAMPLE)], setup.size))
        return cmc

    @classmethod
    def check_images(cls, images: ImageSet) -> None:
        if images.channels != 3:
            raise ConfigError(f"vision.method: cmc splits colour images, but those of {images.name} are grey.")

    @classmethod
    def samples(
        cls, views: int, images: int, rows: Callable[..., Tensor], labels: Tensor | None
    ) -> Iterator[tuple[str, Related]]:
        yield "cmc", both_directions(rows(images), rows(images), None, labels)

    def halves(self, images: Tensor) -> tuple[Tensor, Tensor]:
        converted = lab(images)
        return converted[:, :1], converted[:, 1:]

    def set_statistics(self, images: Tensor) -> None:
        """Mean and standard deviation of L, a and b from RGB images in [0, 1]."""
        for branch, half in zip((self.light, self.colour), self.halves(images), strict=True):
            std, mean = torch.std_mean(half, (0, 2, 3))
            branch.encoder.set_statistics(mean, std.clamp_min(1e-3))

    def forward(self, batch: Batch) -> Embedded:
        (view,) = batch.views
        light, colour = (
            branch(half) for branch, half in zip((self.light, self.colour), self.halves(view), strict=True)
        )
        own = instances(batch, light)
        self._fresh = (light.detach(), colour.detach(), own["index"])
        bank, seed = self.bank, batch.seed

        def relate(rows: dict[str, Tensor]) -> Related:
            index, remembered = rows["index"], None
            if bank is not None:
                memory = self.get_buffer("memory").to(light.dtype)
                remembered = memory[:, index], memory[:, draw_others(memory.shape[1], index, bank, seed)]
            return both_directions(rows["light"], rows["colour"], remembered, rows.get("labels"), index)

        return Embedded({"light": light, "colour": colour, **own}, relate)

    @torch.no_grad()
    def after_step(self) -> None:
        if self.bank is not None and self._fresh is not None:
            light, colour, index = of_all_ranks(*self._fresh)
            memory = self.get_buffer("memory")
            fresh = F.normalize(torch.stack([light, colour]).to(memory.dtype), dim=2)
            memory[:, index] = F.normalize(memory[:, index].lerp(fresh, 1 - self.momentum), dim=2)
        self._fresh = None

    def features(self, images: Tensor) -> Tensor:
        light, colour = self.halves(images)
        return torch.cat([self.light.features(light), self.colour.features(colour)], 1)

    def embedding(self, images: Tensor) -> Tensor:
        light, colour = self.halves(images)
        return F.normalize(self.light(light), dim=1) + F.normalize(self.colour(colour), dim=1)

    def branches(self) -> list[Branch]:
        return [self.light, self.colour]

    def trained_encoder(self) -> Encoder:
        raise ConfigError("a run with method 'cmc' has two encoders and cannot be exported as one model.")


def both_directions(
    light: Tensor,
    colour: Tensor,
    remembered: tuple[Tensor, Tensor] | None,
    labels: Tensor | None = None,
    index: Tensor | None = None,
) -> tuple[Pairs, Pairs]:
    """Pairs of two halves (B, d): each half's rows look for their partners in the other half.

    remembered: ((2, B, d) own, (2, Q, d) drawn): with it, the partner is the image's own row of the other half's
        memory, and the negatives are the drawn ones, instead of the batch's.
    """
    cross = partial(Pairs.cross, labels=labels, index=index)
    if remembered is None:
        return cross(light, colour), cross(colour, light)
    (own_light, own_colour), (of_light, of_colour) = remembered
    cross = partial(cross, batch_negatives=False, queue_of="keys")
    return cross(light, own_colour, of_colour), cross(colour, own_light, of_light)


def draw_others(total: int, taken: Tensor, count: int, seed: int) -> Tensor:
    """`count` random indices of `total` images, none of those taken (B,); total >= count + B."""
    order = torch.randperm(total, generator=generator(seed, taken.device), device=taken.device)
    order = order[: count + len(taken)]  # enough, whatever is taken
    is_taken = torch.zeros(total, dtype=torch.bool, device=taken.device).index_fill_(0, taken, True)
    # A stable sort instead of a mask: the number of rows is known without reading the device.
    return order[is_taken[order].long().argsort(stable=True)[:count]]
