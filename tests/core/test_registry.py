"""The registry: names are taken once, data about entries is complete."""

from typing import Annotated

import pytest

import dipole
from dipole.core.contrast.objective import Objective
from dipole.core.contrast.options import Range
from dipole.core.contrast.registry import registry
from dipole.core.ground.errors import RegistryError, SpecError

BASES = {
    "infonce", "quickthoughts", "dcl", "hcl", "align_uniform", "cacr", "tuple", "triplet", "co2", "swav", "blocks",
    "cross_entropy",
}  # fmt: skip


def test_everything_of_the_formulas_is_registered():
    assert {entry.name for entry in registry.entries("objective")} >= BASES
    assert {entry.name for entry in registry.entries("regularizer")} >= {"dp", "cllr"}
    assert len(registry.entries("diagnostic")) >= 8


@pytest.mark.parametrize("entry", registry.entries(), ids=lambda entry: entry.name)
def test_every_entry_says_what_it_is(entry):
    assert entry.summary.endswith(".")
    assert entry.formula
    assert entry.source
    for option in entry.options:
        assert option.help, f"{entry.name}.{option.name} has no help"
        assert option.allowed


def test_a_taken_name_raises():
    with registry.temporary(), pytest.raises(RegistryError, match="already registered by dipole"):

        @registry.register("infonce", source="none", formula="0")
        class Other(Objective):
            """Another."""


def test_one_file_and_one_decorator_are_enough():
    with registry.temporary():

        @registry.register("margin_mean", aliases=("mm",), formula="-s", source="here")
        class MarginMean(Objective):
            """Mean similarity of positives below a margin."""

            needs_negatives = False

            def __init__(self, margin: Annotated[float, Range(at_least=0), "margin"] = 0.5) -> None:
                super().__init__("cosine")
                self.margin = margin

            def loss(self, positive, rows):
                return rows.over_positives((self.margin - positive).clamp_min(0))

        built = dipole.objective("mm(margin=1) + 0.1*dp")
        assert str(built) == "margin_mean(margin=1.0) + 0.1*dp"
        with pytest.raises(SpecError, match=r"margin must be a number >= 0"):
            dipole.objective("margin_mean(margin=-1)")
    with pytest.raises(SpecError, match="unknown name"):
        dipole.objective("margin_mean")
