"""The [toy] table: LMCL's points in the plane, and Gaussian classes with known factors."""

from typing import Literal, Self

from pydantic import Field, model_validator

from dipole.core.objectives.pair_data import ViewNegatives
from dipole.core.train.config import Settings

OF_PLANES = ("noise", "starts", "scale", "inits")
OF_CLASSES = ("views", "negatives", "classes", "separation", "imbalance", "label_noise", "test_points")


class ToyConfig(Settings):
    """The [toy] table. Settings of the other data have no effect and are refused."""

    data: Literal["three-bars", "nested-moons", "gaussian-classes"] = "three-bars"
    points: int = Field(900, ge=6, description="number of training points, drawn by the seed")
    noise: float = Field(0.06, gt=0, description="planes: deviation of the noise that makes a point's positive")
    starts: int = Field(300, ge=1, description="planes: random first matrices, of which the best is trained")
    scale: float = Field(0.1, gt=0, description="planes: deviation of their entries")
    inits: int = Field(10, ge=1, description="planes: starts of k-means; the best by inertia counts")
    views: int = Field(2, ge=2, description="gaussian-classes: views of a point, K + 1")
    negatives: ViewNegatives = Field(
        "all", description="gaussian-classes: negatives of an anchor, as vision.simclr.negatives"
    )
    classes: int = Field(10, ge=2, description="gaussian-classes: number of classes")
    separation: float = Field(
        1.0, gt=0, description="gaussian-classes: deviation of the class means, where that within a class is 1"
    )
    imbalance: float = Field(1.0, ge=1, description="gaussian-classes: size of the largest class over the smallest")
    label_noise: float = Field(0.0, ge=0, le=1, description="gaussian-classes: share of training labels made wrong")
    test_points: int = Field(2000, ge=2, description="gaussian-classes: number of test points, of balanced classes")

    @model_validator(mode="after")
    def _check(self) -> Self:
        fields = type(self).model_fields
        is_plane = self.data != "gaussian-classes"
        useless = [
            name
            for name, field in fields.items()
            if getattr(self, name) != field.default and name in (OF_CLASSES if is_plane else OF_PLANES)
        ]
        if useless:
            raise ValueError(f"{', '.join(useless)}: no effect with data {self.data!r}. Remove it.")
        if not is_plane and self.points < self.classes:
            raise ValueError(f"points: {self.points} for {self.classes} classes. Give each class a point or more.")
        return self
