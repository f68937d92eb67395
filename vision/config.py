"""The [vision] table of a recipe."""

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from pydantic import Field, create_model, model_validator

from dipole.vision.augment import MOST_VIEWS
from dipole.vision.encoders.hub import processor_of
from dipole.vision.frameworks import DEFAULT, Framework, by_name
from dipole.vision.pairs import kind_of
from dipole.vision.settings import VisionSettings

FRAMEWORKS = by_name()
CAPTIONED = [name for name, framework in FRAMEWORKS.items() if framework.reads_captions]
SINGLE = [name for name, framework in FRAMEWORKS.items() if framework.single]

if TYPE_CHECKING:
    FrameworkName = str
else:
    FrameworkName = Literal[tuple(FRAMEWORKS)]


def _negatives(name: str, framework: type[Framework]) -> str:
    return f"{name}: {framework.negatives_mean or f'none, {framework.without_negatives}'}"


class CheckedSettings(VisionSettings):
    """The [vision] table, checked against the framework."""

    method: FrameworkName = DEFAULT
    views: int | None = Field(
        None, ge=1, le=MOST_VIEWS, description=f"views per image, K + 1 (default 2, and 1 for {' and '.join(SINGLE)})"
    )
    negatives: int | None = Field(
        None, ge=1, description="; ".join(_negatives(name, framework) for name, framework in FRAMEWORKS.items())
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Check the settings against the framework and fill in its defaults: the stored configuration is complete."""
        if self.caption is not None and "method" not in self.model_fields_set:
            self._fill("method", CAPTIONED[0])
        if problems := [*self._pair_problems(), *self._framework_problems()]:
            raise ValueError("; ".join(problems))
        framework = self.framework
        if framework.projector is not None and self.encoder.projector == "mlp":
            defaults = zip(("projector_layers", "projector_norm"), framework.projector, strict=True)
            update = {name: value for name, value in defaults if getattr(self.encoder, name) is None}
            self._fill("encoder", self.encoder.model_copy(update=update))
        if self.views is None:
            views = len(self.columns or ()) or 2
            self._fill("views", 1 if framework.single else views)
        if self.negatives is None:
            self._fill("negatives", framework.default_negatives)
        if framework.table is not None and self.own_table is None:
            self._fill(self.method, framework.table())
        views = len(framework.augmentations(self))
        if beyond := [number for number in self.augment.view if int(number) > views]:
            raise ValueError(f"augment.view.{beyond[0]} has no effect: an image has {views} views")
        if self.encoder.is_hub and self.augment.size is None and (side := processor_of(self.encoder.source).size):
            self._fill("augment", self.augment.model_copy(update={"size": side}))
        return self

    def _fill(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _pair_problems(self) -> list[str]:
        """Describe settings that do not fit vision.pairs."""
        problems = []
        if self.pairs not in self.framework.pairs:
            able = [name for name, framework in FRAMEWORKS.items() if self.pairs in framework.pairs]
            allowed = f"it takes pairs = {' or '.join(map(repr, self.framework.pairs))}"
            problems.append(
                f"method {self.method!r} cannot carry pairs = {self.pairs!r}: {allowed}; methods that can: "
                f"{', '.join(able)}"
            )
        for name, value in (("columns", "columns"), ("caption", "columns"), ("images_per_class", "labels")):
            if getattr(self, name) is not None and self.pairs != value:
                problems.append(f"{name} has no effect with pairs {self.pairs!r}. Set vision.pairs = {value!r}")
        if self.pairs == "columns" and self.caption is not None:
            if not self.framework.reads_captions:
                problems.append(f"method {self.method!r} has no encoder for captions. Set method = {CAPTIONED[0]!r}")
            if self.columns is None:
                self._fill("columns", ("image", "caption"))
        if self.pairs == "columns" and self.caption is None and self.framework.reads_captions:
            problems.append(f"method {self.method!r} needs a text model: set vision.caption.encoder = 'hub:...'")
        return problems + kind_of(self).problems(self)

    def _framework_problems(self) -> list[str]:
        """Describe settings that do not fit the framework."""
        framework = self.framework
        problems = [
            f"[vision.{name}] has no effect with method {self.method!r}"
            for name, other in FRAMEWORKS.items()
            if other.table is not None and name != self.method and getattr(self, name) is not None
        ]
        if framework.single and self.views not in (None, 1):
            problems.append(f"method {self.method!r} takes views = 1: {framework.single}. Set vision.views = 1")
        if not framework.single and self.views == 1 and self.pairs != "labels":
            problems.append(f"method {self.method!r} needs views = 2 or more")
        if not framework.negatives_mean and self.negatives is not None:
            problems.append(f"negatives has no effect with method {self.method!r}; {framework.without_negatives}")
        if self.encoder.projector != "mlp":
            problems += [
                f"encoder.{name} has no effect with projector {self.encoder.projector!r}. Choose projector = 'mlp'"
                for name in ("projector_layers", "projector_norm")
                if getattr(self.encoder, name) is not None
            ]
        return problems

    def determining(self) -> dict[str, Any]:
        found = super().determining()
        if found.get(DEFAULT) == {}:
            del found[DEFAULT]  # the default framework with its defaults does not change the name of a run
        return found

    @property
    def positives(self) -> int:
        """Number of positives of an image and the image itself: views, or members of a block."""
        key = self.framework.positives_key
        if not key:
            return self.count
        return int(attrgetter(key)(self)) + (not self.framework.counts_anchor)

    @property
    def block_positives(self) -> int:
        """Positives of a point in a block, b, or 1 without blocks, for probes that draw some."""
        return 1 if self.framework.counts_anchor else self.positives - 1

    @property
    def framework(self) -> type[Framework]:
        """The class of the method."""
        return FRAMEWORKS[self.method]


if TYPE_CHECKING:
    VisionConfig: TypeAlias = CheckedSettings
else:
    VisionConfig = create_model(
        "VisionConfig",
        __base__=CheckedSettings,
        __module__=__name__,
        __doc__="The [vision] table.",
        **{
            name: (framework.table | None, Field(None, description=f"only with method = {name!r}"))
            for name, framework in FRAMEWORKS.items()
            if framework.table is not None
        },
    )
