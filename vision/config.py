"""The [vision] table of a recipe."""

from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from pydantic import Field, create_model, model_validator

from dipole.core.train.config import Settings
from dipole.vision.augment import AugmentConfig
from dipole.vision.data import DataConfig
from dipole.vision.encoders import EncoderConfig
from dipole.vision.encoders.processor import processor_of
from dipole.vision.frameworks import DEFAULT, Method, by_name
from dipole.vision.frameworks.base import MOST_VIEWS
from dipole.vision.probes import ProbeConfig

FRAMEWORKS = by_name()
SINGLE = [name for name, method in FRAMEWORKS.items() if method.single]

if TYPE_CHECKING:
    FrameworkName = str
else:
    FrameworkName = Literal[tuple(FRAMEWORKS)]


def _negatives(name: str, method: type[Method]) -> str:
    return f"{name}: {method.negatives_mean or f'none, {method.without_negatives}'}"


class VisionSettings(Settings):
    """The [vision] table without the frameworks' own tables."""

    method: FrameworkName = DEFAULT
    views: int | None = Field(
        None, ge=1, le=MOST_VIEWS, description=f"views per image, K + 1; default 2, and 1 for {' and '.join(SINGLE)}"
    )
    negatives: int | None = Field(
        None, ge=1, description="; ".join(_negatives(name, method) for name, method in FRAMEWORKS.items())
    )
    compile: bool = Field(False, description="the same as train.compile")
    data: DataConfig = DataConfig()
    encoder: EncoderConfig = EncoderConfig()
    augment: AugmentConfig = AugmentConfig()
    probe: ProbeConfig = ProbeConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Check the settings against the method and give it its own table: the stored configuration is complete."""
        method = self.framework
        problems = [
            f"[vision.{name}] has no effect with method {self.method!r}"
            for name, other in FRAMEWORKS.items()
            if other.table is not None and name != self.method and getattr(self, name) is not None
        ]
        if method.single and self.views not in (None, 1):
            problems.append(f"method {self.method!r} takes views = 1: {method.single}")
        if not method.single and self.views == 1:
            problems.append(f"method {self.method!r} needs views = 2 or more")
        if not method.negatives_mean and self.negatives is not None:
            problems.append(f"negatives has no effect with method {self.method!r}; {method.without_negatives}")
        if self.encoder.projector != "mlp":
            problems += [
                f"encoder.{name} has no effect with projector {self.encoder.projector!r}; choose projector = 'mlp'"
                for name in ("projector_layers", "projector_norm")
                if getattr(self.encoder, name) is not None
            ]
        if problems:
            raise ValueError("; ".join(problems))
        if method.projector is not None and self.encoder.projector == "mlp":
            told = {"projector_layers": method.projector[0], "projector_norm": method.projector[1]}
            own = {name: value for name, value in told.items() if getattr(self.encoder, name) is None}
            object.__setattr__(self, "encoder", self.encoder.model_copy(update=own))
        if self.views is None:
            object.__setattr__(self, "views", 1 if method.single else 2)
        if self.negatives is None:
            object.__setattr__(self, "negatives", method.default_negatives)
        if method.table is not None and self.own_table is None:
            object.__setattr__(self, self.method, method.table())
        views = len(method.augmentations(self))
        if beyond := [number for number in self.augment.view if int(number) > views]:
            raise ValueError(f"augment.view.{beyond[0]} has no effect: an image has {views} views")
        if self.encoder.is_hub and self.augment.size is None and (side := processor_of(self.encoder).size):
            object.__setattr__(self, "augment", self.augment.model_copy(update={"size": side}))
        return self

    def determining(self) -> dict[str, Any]:
        found = super().determining()
        if found.get(DEFAULT) == {}:
            del found[DEFAULT]  # runs from before it had a table keep their names
        return found

    @property
    def framework(self) -> type[Method]:
        """The class of the method."""
        return FRAMEWORKS[self.method]

    @property
    def own_table(self) -> Any:
        """The method's own table; None where it has none."""
        return None if self.framework.table is None else getattr(self, self.method)

    @property
    def count(self) -> int:
        """Views per image, without the small crops."""
        return self.views or 2


if TYPE_CHECKING:
    VisionConfig: TypeAlias = VisionSettings
else:
    VisionConfig = create_model(
        "VisionConfig",
        __base__=VisionSettings,
        __module__=__name__,
        __doc__="The [vision] table.",
        **{
            name: (method.table | None, Field(None, description=f"only with method = {name!r}"))
            for name, method in FRAMEWORKS.items()
            if method.table is not None
        },
    )
