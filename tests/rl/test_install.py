"""What `pip install "dipole[rl]"` asks for where dm_control's labmaze has no wheel."""

from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement


def asked(package: str, python: str, extra: str = "") -> dict[str, Requirement]:
    lines = [Requirement(each) for each in requires(package) or []]
    place = {"python_version": python, "extra": extra}
    return {each.name.lower(): each for each in lines if each.marker is None or each.marker.evaluate(place)}


def test_up_to_3_12_dm_control_installs_its_dependencies():
    assert "dm-control" in asked("dipole", "3.12", "rl")
    assert "dm-tree" not in asked("dipole", "3.12", "rl")


@pytest.mark.parametrize("python", ["3.13", "3.14"])
def test_from_3_13_the_extra_lists_dependencies_of_dm_control_except_labmaze(python):
    ours = asked("dipole", python, "rl")
    assert "dm-control" not in ours
    assert asked("dm-control", python).keys() - ours.keys() - {"labmaze"} == set()
