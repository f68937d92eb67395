"""Every objective in every layout ends above its untrained encoder, or is refused as the table says."""

import json
from pathlib import Path

import pytest

from dipole.benchmarks.studies import learning_everywhere as study
from dipole.core.utils.errors import DipoleError

KEPT = Path(study.__file__).parents[1] / "results" / "learning-everywhere.json"
CELLS = [(layout, name) for layout in study.LAYOUTS for name in study.OBJECTIVES]
QUICK = [("window", "align_uniform")]  # it used to end at two opposite points


@pytest.mark.parametrize(
    ("layout", "name"), [*QUICK, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in CELLS if cell not in QUICK)]
)
def test_every_objective_learns_in_every_layout_or_is_refused(tmp_path, layout, name):
    trial = study.Trial(layout, 0, tmp_path)
    if (layout, name) in study.REFUSED:
        with pytest.raises(DipoleError, match=study.REFUSED[layout, name]):
            trial.train(study.text_of(layout, name))
    else:
        before, after = trial.train(study.text_of(layout, name))
        assert after > before


KEPT_CELLS = [(layout, name) for layout, cells in json.loads(KEPT.read_text()).items() for name in cells]


@pytest.mark.parametrize(("layout", "name"), KEPT_CELLS)
def test_the_kept_numbers_are_above_the_untrained_encoder(layout, name):
    for value in json.loads(KEPT.read_text())[layout][name].values():
        if (layout, name) in study.REFUSED:
            assert study.REFUSED[layout, name] in value
        else:
            before, after = value
            assert after > before


def test_what_is_refused_is_named_once():
    assert study.REFUSED.keys() <= set(CELLS)
    assert study.OTHERWISE.keys() <= set(CELLS) - study.REFUSED.keys()
