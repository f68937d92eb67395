"""Contrastive multiview coding: the two halves of Lab through two networks."""

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, Self, get_args

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from dipole.core.objectives.checks import check_choice, check_numbers
from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.spec import check_whole
from dipole.core.objectives.term_values import without_autocast
from dipole.core.train.config import Settings
from dipole.core.utils.errors import ConfigError, PairsError
from dipole.core.utils.transfer import constant, generator
from dipole.vision.encoders import Encoder
from dipole.vision.encoders.base import narrow
from dipole.vision.frameworks.base import AnyObjective, AnyPairs, Batch, Draw, Framework, embedded, register_framework
from dipole.vision.frameworks.branch import Branch, Setup, check_built, make_branch
from dipole.vision.frameworks.queue import check_momentum, check_rows
from dipole.vision.image_ops import centre
from dipole.vision.image_set import ImageSet
from dipole.vision.settings import VisionSettings

SAMPLE = 2000  # images from which the statistics of Lab are taken

# CIE 1976 L*a*b* of sRGB under D65: the matrix to XYZ and the white point (IEC 61966-2-1, CIE 15).
XYZ = ((0.412453, 0.357580, 0.180423), (0.212671, 0.715160, 0.072169), (0.019334, 0.119193, 0.950227))
WHITE = (0.950456, 1.0, 1.088754)


def lab(images: Tensor) -> Tensor:
    """Convert RGB in [0, 1] to CIE L*a*b* (n, 3, H, W): L in [0, 100], a and b about [-110, 110], divided by 100."""
    linear = torch.where(images > 0.04045, ((images + 0.055) / 1.055).clamp_min(0) ** 2.4, images / 12.92)
    matrix = constant(XYZ, images) / constant(WHITE, images)[:, None]
    with without_autocast(images.device.type):
        xyz = torch.einsum("ij,njhw->nihw", matrix, linear)
    f = torch.where(xyz > 0.008856, xyz.clamp_min(1e-8) ** (1 / 3), 7.787 * xyz + 16 / 116)
    x, y, z = f.unbind(1)
    return torch.stack([1.16 * y - 0.16, 5 * (x - y), 2 * (y - z)], 1)


def halves(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return L (n, 1, H, W) and ab (n, 2, H, W) of RGB images."""
    converted = lab(images)
    return converted[:, :1], converted[:, 1:]


Directions = Literal["sum", "mean"]


class CMCConfig(Settings):
    """The [vision.cmc] table."""

    momentum: float = Field(0.5, ge=0, lt=1, description="of the memory bank")
    width: float = Field(0.5, gt=0, le=1, description="of each encoder, as a share of the encoder's; Tian et al.: 0.5")
    directions: Directions = Field("sum", description="of the two directions' losses: sum (Tian et al.'s code) or mean")

    def determining(self) -> dict[str, Any]:
        found = super().determining()
        found.pop("directions", None)
        # Runs before this setting took the mean, and keep their names.
        return found if self.directions == "mean" else found | {"directions": self.directions}


@register_framework("cmc")
class CMC(Framework):
    """Contrastive multiview coding (Tian et al. 2020): L and ab of one view through two networks, in both directions.

    With a memory bank, as in the authors' code, negatives are drawn from a running mean of every image's embedding per
    half, and the positive is the image's own row in the other half's bank. (With a fresh embedding as positive, both
    halves could move away from the bank together, with all images at one point.) Without a bank, positives and
    negatives are those of the batch. Probes see both encoders' features side by side.

        >>> backbone = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, 2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1))
        >>> model = CMC(backbone, objective="infonce(temperature=0.07)")
        >>> loss = model([torch.rand(8, 3, 32, 32)])
        >>> model.features(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 32])

    Several views of the images are each a batch of their own, whose losses are added or averaged like directions.

    Args:
        backbone: for L, images of one channel. Without `colour`, a network for colour images: two copies of it are
            trained, whose first convolution reads one and two channels.
        objective: its text, an Objective or a Composite.
        head: the projection head of L. None is the paper's (`projection_head`), `nn.Identity()` is none.
        colour: the network for a and b, two channels.
        colour_head: its projection head. None is a copy of `head`, or the paper's.
        images: rows of the memory bank: images of the data set.
        bank: negatives drawn from the memory bank. None takes those of the batch. With a bank, call
            `model(views, index=rows)`.
        momentum: of the memory bank.
        directions: "sum" adds the losses of the two directions, as in the authors' code. "mean" averages them.

    Raises:
        ConfigError: there is no network for a and b, and `backbone` has no convolution of three channels, or the bank
            has fewer rows than its negatives.
    """

    table = CMCConfig
    head_name = "cmc"
    single = "the two halves of Lab are its two views"
    pairs = ("augmented",)
    negatives_mean = "drawn from a memory bank instead of the batch"
    positives_key = ""

    def __init__(
        self,
        backbone: nn.Module,
        objective: AnyObjective | None,
        head: nn.Module | None = None,
        colour: nn.Module | None = None,
        colour_head: nn.Module | None = None,
        images: int = 0,
        bank: int | None = None,
        momentum: float = 0.5,
        directions: Directions = "sum",
    ) -> None:
        super().__init__(objective)
        check_momentum(momentum)
        check_choice("directions", directions, *get_args(Directions))
        if colour is None:
            backbone, colour = with_channels(backbone, 1), with_channels(backbone, 2)
        if head is not None and colour_head is None:
            colour_head = copy.deepcopy(head)
        self.light = make_branch(backbone, head, self.head_name)
        self.colour = make_branch(colour, colour_head, self.head_name)
        self.bank = bank
        self.directions: Directions = directions
        self.momentum = momentum
        if bank is not None:
            check_whole("bank", bank)
            check_whole("images", images, 0)
            if images <= bank:
                raise ConfigError(
                    f"CMC: a bank of {images} images has no {bank} negatives: images= is the data set's size."
                )
            like = next(self.light.parameters(), torch.empty(0))
            drawn = torch.randn(2, images, self.embedding_dim).to(like)
            self.register_buffer("memory", F.normalize(drawn, dim=2))
        self._build_objective()

    @classmethod
    def from_config(cls, config: VisionSettings, setup: Setup) -> Self:
        images, table = setup.images, config.own_table
        cls.check_images(images)
        bank, most = config.negatives, len(images) - setup.batch_size
        if bank is not None and bank > most:
            raise ConfigError(
                f"vision.negatives: {bank} of a memory bank and a batch of {setup.batch_size} are more than the "
                f"{len(images)} images of {images.name}. Give at most {most}."
            )
        light, colour = setup.branch(1, table.width), setup.branch(2, table.width)
        given = {"momentum": table.momentum, "directions": table.directions}
        cmc = cls(light, None, colour=colour, images=len(images), bank=bank, **given)
        for branch, half in zip((light, colour), halves(centre(images.images[slice(SAMPLE)], setup.size)), strict=True):
            std, mean = torch.std_mean(half, (0, 2, 3))  # of L, a and b
            assert isinstance(branch.encoder, Encoder)
            branch.encoder.set_statistics(mean, std.clamp_min(1e-3))
        return cmc

    @classmethod
    def check_images(cls, images: ImageSet) -> None:
        if images.channels != 3:
            raise ConfigError(
                f"vision.method: cmc splits images of 3 channels, but those of {images.name} have {images.channels}. "
                "Set vision.data.source."
            )

    @classmethod
    def sample(cls, views: int, rows: Draw, labels: Tensor | None) -> AnyPairs:
        return both_directions(rows(), rows(), None, labels)

    def embed(self, batch: Batch) -> EncodedBatch:
        for view in batch.views:
            if view.shape[1] != 3:
                raise PairsError(f"CMC splits images of three channels into L and ab, got {tuple(view.shape)}.")
        if self.bank is not None:
            if batch.rows is None:
                raise PairsError("CMC's memory bank needs the index of each image: model(views, index=rows), (B,).")
            total = self.get_buffer("memory").shape[1]
            wrong = f"CMC: index counts the {total} images of the memory bank from 0, got"
            check_numbers(batch.rows, 0, total - 1, lambda low, high: f"{wrong} {low} to {high}.")
        of_light, of_colour = zip(*map(halves, batch.views), strict=True)
        light, colour = [self.light(half) for half in of_light], [self.colour(half) for half in of_colour]
        found = embedded({"light": light, "colour": colour}, batch, self._pair)
        if self.bank is not None:
            index = found.rows["index"]
            assert index is not None
            self._fresh.add(light[-1], colour[-1], index)
        return found

    def _pair(self, rows: dict[str, Any], seed: int) -> AnyPairs:
        index, remembered = rows.get("index"), None
        if self.bank is not None:
            assert index is not None
            memory = self.get_buffer("memory").to(rows["light"][0].dtype)
            most = memory.shape[1] - len(index)
            if self.bank > most:
                raise PairsError(
                    f"CMC: a bank of {memory.shape[1]} images has {most} without the batch, and bank = {self.bank}."
                )
            drawn = draw_others(memory.shape[1], index, self.bank, seed)
            remembered = memory[:, index], memory[:, drawn]
        pairs: list[Pairs] = []
        for light, colour in zip(rows["light"], rows["colour"], strict=True):
            pairs += both_directions(light, colour, remembered, rows.get("labels"), index)
        if self.directions == "sum":
            pairs = [each.added() for each in pairs]
        return tuple(pairs)

    @torch.no_grad()
    def update(self) -> None:
        for light, colour, index in self._fresh.take():
            memory = self.get_buffer("memory")
            fresh = F.normalize(torch.stack([light, colour]).to(memory.dtype), dim=2)
            memory[:, index] = F.normalize(memory[:, index].lerp(fresh, 1 - self.momentum), dim=2)

    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str, *args: Any) -> None:
        if self.bank is not None:
            check_rows(state.get(f"{prefix}memory"), self.get_buffer("memory").shape[1], "memory bank", "images")
        super()._load_from_state_dict(state, prefix, *args)

    def features(self, images: Tensor) -> Tensor:
        light, colour = halves(images)
        return torch.cat([self.light.features(light), self.colour.features(colour)], 1)

    def embedding(self, images: Tensor) -> Tensor:
        light, colour = halves(images)
        return F.normalize(self.light(light), dim=1) + F.normalize(self.colour(colour), dim=1)

    def branches(self) -> list[Branch]:
        return [self.light, self.colour]


def with_channels(backbone: nn.Module, channels: int) -> nn.Module:
    """Return a copy of a network for colour images that reads fewer channels, each by an equal share of the weights."""
    check_built(backbone)
    found = copy.deepcopy(backbone)
    if not narrow(found, 3, channels):
        raise ConfigError(
            f"CMC: {type(backbone).__name__} has no plain first convolution of three channels. Give a network for L, "
            "(B, 1, H, W), and one for a and b, (B, 2, H, W): CMC(light, objective, colour=colour)."
        )
    return found


def both_directions(
    light: Tensor,
    colour: Tensor,
    remembered: tuple[Tensor, Tensor] | None,
    labels: Tensor | None = None,
    index: Tensor | None = None,
) -> tuple[Pairs, Pairs]:
    """Pair two halves (B, d), or each with `remembered` positives (2, B, d) and negatives (2, Q, d) of the other."""
    cross = partial(Pairs.cross, labels=labels, index=index)
    if remembered is None:
        return cross(light, colour), cross(colour, light)
    (own_light, own_colour), (drawn_light, drawn_colour) = remembered
    cross = partial(cross, batch_negatives=False, queue_of="keys")
    return cross(light, own_colour, drawn_colour), cross(colour, own_light, drawn_light)


def draw_others(total: int, excluded: Tensor, count: int, seed: int) -> Tensor:
    """Draw `count` indices of `total` images, without those excluded (B,). total >= count + B."""
    order = torch.randperm(total, generator=generator(seed, excluded.device), device=excluded.device)
    order = order[: count + len(excluded)]  # enough, whatever is excluded
    is_excluded = torch.zeros(total, dtype=torch.bool, device=excluded.device).index_fill_(0, excluded, True)
    # A stable sort instead of a mask: the number of rows is known without reading the device.
    return order[is_excluded[order].long().argsort(stable=True)[:count]]
