"""Every block of docs/how-to/own-losses.md runs, and what it registers passes the conformance kit."""

import importlib
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from loops import QUICK

import dipole
from dipole import PairsError, check_objective
from dipole.core.objectives.registry import registry
from dipole.core.train.schedule import check, read

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "own-losses.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
if find_spec("triton") is None:
    BLOCKS = [block for block in BLOCKS if "import triton" not in block]
NAMES = [name for block in BLOCKS for name in re.findall(r'@register\(\s*"(\w+)"', block)]


@pytest.fixture(scope="module", autouse=True)
def blocks(tmp_path_factory):
    """Each block is a module, which other processes can import."""
    folder = tmp_path_factory.mktemp("own")
    sys.path.insert(0, str(folder))
    with registry.temporary():
        for number, block in enumerate(BLOCKS):
            (folder / f"own_loss_{number}.py").write_text(block)
            importlib.import_module(f"own_loss_{number}")
        yield
    sys.path.remove(str(folder))


@pytest.mark.parametrize("left_out", [("size", "tiled", "close pairs"), pytest.param((), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_what_the_page_registers_passes_the_kit(name, left_out):
    report = check_objective(name, only=[*(each for each in QUICK if each not in left_out), "ranks"])
    assert report.ok, report.table()


def test_the_page_shows_each_hook_and_what_it_schedules():
    text = "".join(BLOCKS)
    hooks = ("build", "prepare", "extra_pairs", "project", "summary", "remarks", "after_step", "statistics")
    words = ("negative_mask()", "rows.y", 'weighting = "own"', "self.materialize(", "rows.note(", "stateful = True")
    for word in (*(f"def {hook}(" for hook in hooks), *words, "detached = ", "PairsError("):
        assert word in text
    with pytest.raises(PairsError, match="arcface needs labels"):
        dipole.objective("arcface")(torch.randn(4, 3), torch.randn(4, 3))
    (line,) = re.findall(r'^"(centred\.temperature)" = "(.*?)"', PAGE.read_text(), re.MULTILINE)
    assert check({line[0]: read(line[1])}, dipole.objective("centred", dim=4), 100) == []
    loss = dipole.objective("infonce + 0.1*centred(least=6)", dim=4)
    assert loss(torch.randn(2, 4), torch.randn(2, 4)).terms["centred"].note == "0: fewer than 6 rows"
    loss.after_step(0.1, 3, 12)
    term = loss.terms[1]
    assert (term.summary()["part of the run"], term.remarks()) == (0.25, [])
    other = dipole.objective("infonce + 0.1*centred(least=6)", dim=4)
    other.load_state_dict(loss.state_dict())
    views = torch.randn(4, 4), torch.randn(4, 4)
    assert loss(*views).loss == other(*views).loss
