"""A backbone and its projection head, over any module."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.freezing import in_mode
from dipole.vision.encoders import Encoder, EncoderConfig, build_encoder, build_projector
from dipole.vision.heads import Projection, projection_head
from dipole.vision.image_set import ImageSet

SIDES = (32, 64, 224, 8, 16, 28, 48, 84, 96, 128, 192, 256, 299, 336, 384, 448, 512)
"""Sides of the images, in pixels, with which the width of a plain backbone is measured. Two that work are enough."""
Placed = TypeVar("Placed", bound=nn.Module)
POOLED = ("pooler_output", "image_embeds", "text_embeds")
"""Outputs of models of transformers that have one row for each input."""


class Branch(nn.Module):
    """A backbone and its projector.

    Args:
        backbone: an `Encoder`, or any module that maps images (n, C, H, W) to features (n, ...), which are flattened.
        projector: of the features, or None.
        tap: the layer of an `Encoder` that probes read. None means the last.
        dim: width of the embedding. By default it is measured.

    Raises:
        ConfigError: backbone or projector is no module, the backbone has layers of unknown size, or there is no such
            layer.

    Attributes:
        returns_features: whether a call returns (embeddings, features). `PassedFeatures` sets it.
    """

    returns_features = False

    def __init__(
        self, backbone: nn.Module, projector: nn.Module | None = None, tap: str | None = None, dim: int | None = None
    ) -> None:
        super().__init__()
        check_built(backbone)
        check_module("head", projector)
        self.encoder = backbone
        self.projector = nn.Identity() if projector is None else projector
        self.tap = backbone.check_tap(tap) if isinstance(backbone, Encoder) else None
        if dim is not None:
            self.dim = dim

    @cached_property
    def dim(self) -> int:
        """Width of the embedding.

        Raises:
            ConfigError: it is unknown.
        """
        linear = [layer for layer in self.projector.modules() if isinstance(layer, nn.Linear)]
        if linear:
            return linear[-1].out_features
        if isinstance(self.projector, nn.Identity):
            return self.width
        return feature_width(self)

    @cached_property
    def width(self) -> int:
        """Width of the features before the projector.

        Raises:
            ConfigError: it is unknown.
        """
        return feature_width(self.encoder)

    def forward(self, images: Tensor) -> Any:
        """Return the embeddings (n, dim) after the projector. With `returns_features` also the encoder's features.

        Args:
            images: (n, C, H, W) as the backbone takes them, in [0, 1] for an `Encoder`.
        """
        features = rows_of(self.encoder(images), self.encoder)
        if self.returns_features:
            return self.projector(features), features
        return self.projector(features)

    def features(self, images: Tensor) -> Tensor:
        """Return the features that probes see, (n, width of the tap).

        Args:
            images: as in `forward`.
        """
        if self.tap is None:
            return rows_of(self.encoder(images), self.encoder)
        return rows_of(self.encoder(images, self.tap), self.encoder)


@dataclass(frozen=True)
class Setup:
    """The images, sizes and encoder that a framework is built for.

    Args:
        images: those of pretraining.
        size: side of the views in pixels.
        batch_size: images of a step over all ranks.
        encoder: its table.
    """

    images: ImageSet
    size: int
    batch_size: int
    encoder: EncoderConfig

    def branch(self, channels: int | None = None, share: float = 1.0) -> Branch:
        """Return an encoder with its projector.

        Args:
            channels: of the images. By default those of the data set.
            share: of the width of every layer of the encoder, > 0.
        """
        channels = channels or self.images.channels
        encoder = build_encoder(self.encoder, channels, self.size, share)
        if channels == self.images.channels and not encoder.own_statistics:
            encoder.set_statistics(*self.images.statistics)
        projector, width = build_projector(self.encoder, encoder.taps[encoder.last])
        return Branch(encoder, projector, self.encoder.tap, width)


def make_branch(backbone: nn.Module, head: nn.Module | None, name: Projection) -> Branch:
    """Return a backbone with its head, by default the one that a paper names. A `Branch` is returned unchanged."""
    if isinstance(backbone, Branch):
        return backbone
    branch = Branch(backbone, head)
    if head is None:
        branch.projector = placed_like(projection_head(name, branch.width), backbone)
    return branch


def in_passes(branch: nn.Module, views: Sequence[Tensor]) -> list[Tensor]:
    """Return the embeddings (B, d) of each view, with one pass for consecutive views of one shape."""
    found: list[Tensor] = []
    for _, group in groupby(views, key=lambda view: view.shape):
        several = list(group)
        found += branch(torch.cat(several)).chunk(len(several))
    return found


def check_module(name: str, given: Any) -> None:
    """Raise ConfigError unless an argument is a module or None."""
    if given is not None and not isinstance(given, nn.Module):
        raise ConfigError(f"{name} must be a torch.nn.Module or None, got {given!r}.")


def check_built(module: nn.Module) -> None:
    """Raise ConfigError if an encoder is no module, or has lazy layers that have not seen an input."""
    if not isinstance(module, nn.Module):
        got = type(module).__name__
        raise ConfigError(f"an encoder is a torch.nn.Module, such as torchvision.models.resnet18(), got {got}.")
    if any(nn.parameter.is_lazy(each) for each in chain(module.parameters(), module.buffers())):
        raise ConfigError(
            f"{type(module).__name__} has lazy layers, whose size is unknown before their first input. Call it once on "
            "a batch, such as backbone(images), then build the framework."
        )


def placed_like(module: Placed, backbone: nn.Module) -> Placed:
    """Move a new module to the device and the floating-point type of a backbone, and return it."""
    like = next((each for each in backbone.parameters() if each.is_floating_point()), None)
    return module if like is None else module.to(like)


def rows_of(output: Any, module: nn.Module) -> Tensor:
    """Return a module's output as rows (n, width): a tensor (n, ...), or the pooled one of a model of transformers."""
    if isinstance(output, Mapping):
        output = next((output[name] for name in POOLED if output.get(name) is not None), output)
    if not isinstance(output, Tensor) or output.ndim < 2 or not output.is_floating_point():
        raise ConfigError(
            f"the backbone {type(module).__name__} returned {shown(output)}, and not floats with a row for each image. "
            "Wrap it in a module whose forward returns its features, (n, width), such as self.net(images)[0] of a "
            "tuple."
        )
    return output.flatten(1)


def shown(value: Any) -> str:
    """Describe a tensor by type and shape, and anything else by its kind, for a message."""
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def feature_width(backbone: nn.Module) -> int:
    """Return the width of the rows that a module makes of images, measured with images of zeros."""
    if isinstance(backbone, Encoder):
        return backbone.taps[backbone.last]
    fix = "give a head for features of your images' size, such as head=dipole.vision.projection_head('simclr', WIDTH)."
    sizes = measured(backbone, _trials(backbone), f"Wrap it in a module that reads images alone, or {fix}", most=2)
    found = {tuple(images.shape[1:]): width for images, width in sizes}
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    shown = " and ".join(f"{width} for {'x'.join(map(str, shape))}" for shape, width in found.items())
    raise ConfigError(
        f"the width of the features of {type(backbone).__name__} depends on the shape of the images, {shown}. If it "
        f"returns a map, pool it: torch.nn.Sequential(backbone, torch.nn.AdaptiveAvgPool2d(1)). Or {fix}"
    )


def measured(module: nn.Module, trials: Iterable[Tensor], fix: str, most: int = 1) -> list[tuple[Tensor, int]]:
    """Return up to `most` inputs that a module reads, each with its rows' width. Raise ConfigError if it reads none."""
    found: list[tuple[Tensor, int]] = []
    first = ""
    with in_mode(False, module), torch.no_grad():
        for trial in trials:
            try:
                found.append((trial, rows_of(module(trial), module).shape[1]))
            except ConfigError:
                raise
            except Exception as error:  # each module has its own error for inputs of a wrong shape
                first = first or f"{type(error).__name__} for {tuple(trial.shape)}: {str(error).partition(chr(10))[0]}"
            if len(found) == most:
                break
    if not found:
        raise ConfigError(f"the width of {type(module).__name__} is unknown. {first[:300].rstrip('.')}. {fix}")
    return found


def _trials(backbone: nn.Module) -> Iterator[Tensor]:
    like = next(chain(backbone.parameters(), backbone.buffers()), torch.empty(0))
    if not like.is_floating_point():
        like = torch.empty(0, device=like.device)
    first = next((part for part in backbone.modules() if isinstance(part, nn.Conv2d | nn.Linear)), None)
    sides: tuple[int, ...] = SIDES
    counts: tuple[int, ...] = (3, 1, 2)
    if isinstance(first, nn.Conv2d):
        counts = (first.in_channels,)
    elif first is not None:
        # Flattened images: their number of pixels is known.
        squares = {channels: round((first.in_features / channels) ** 0.5) for channels in counts}
        fitting = [side for channels, side in squares.items() if side * side * channels == first.in_features]
        sides = (*fitting, *SIDES)
    # Vision transformers may read images of one shape alone, which a part of them states.
    stated = [getattr(part, "image_size", getattr(part, "img_size", None)) for part in backbone.modules()]
    shapes = [tuple(each) for each in stated if isinstance(each, tuple | list)]
    shapes += [(side, side) for side in (*stated, *sides) if isinstance(side, int)]
    for shape in dict.fromkeys(shapes):
        for channels in counts:
            yield like.new_zeros(2, channels, *shape)  # two: a squeeze() removes an only image


class PassedFeatures:
    """Records what the encoders give their projectors, in the order of the calls.

    Each branch returns (embeddings, features), of which a hook removes the features, so that microbatches split both.
    Raise ConfigError for encoders of different or unknown widths.
    """

    def __init__(self, branches: Sequence[Branch]) -> None:
        widths = {branch.width for branch in branches}
        if len(widths) > 1:
            raise ConfigError(
                "objective: a term acts on the encoder's features, and the encoders of this method have features of "
                "different widths. Take vision.method = 'simclr', or vision.encoder.projector = 'none'."
            )
        (self.width,) = widths
        self._found: list[Tensor] = []
        self._recording = False
        for branch in branches:
            branch.returns_features = True
            branch.register_forward_hook(self._take)

    def _take(self, branch: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> Tensor:
        embeddings, features = output
        if self._recording:
            self._found.append(features)
        return embeddings

    def embed(self, embed: Callable[[], EncodedBatch], images: int) -> EncodedBatch:
        """Return the rows of a batch of `images` with the encoders' features of each view."""
        self._recording = True
        try:
            embedded = embed()
        finally:
            found, self._found, self._recording = self._found, [], False
        views = [view for each in found for view in each.split(images)]
        rows = len(next(row for row in embedded.rows.values() if row is not None))
        if rows < images:
            views = [view.view(rows, images // rows, view.shape[1]) for view in views]
        named = {f"features of view {number}": view for number, view in enumerate(views)}
        return replace(embedded, rows={**embedded.rows, **named}, features=tuple(named))
