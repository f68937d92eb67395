"""What `dipole theory` is asked before it reads a run."""

import pytest
import torch

from dipole.core.cli import main
from dipole.core.evaluation.theory import arora
from dipole.core.utils.errors import OptionError


@pytest.mark.parametrize("delta", ["2", "0", "-1", "nan", "x"])
def test_delta_is_a_probability(delta, capsys):
    assert main(["theory", "RUN", f"--delta={delta}"]) == 2
    assert f"--delta: must be between 0 and 1, got '{delta}'" in capsys.readouterr().err


def test_a_picture_is_refused_before_the_run_is_looked_up(capsys):
    assert main(["theory", "no such run", "--picture", "x.bmp"]) == 2
    assert "a picture ends in .svg, .png, .pdf, got 'x.bmp'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("measure", "said"),
    [
        (lambda x, y: arora.unsupervised(x, y, k=0), "unsupervised: k must be an integer >= 1, got 0"),
        (lambda x, y: arora.mean_classifier(x, y, loss="foo"), "mean_classifier: loss must be one of hinge, logistic"),
        (lambda x, y: arora.class_collision(y, k=0), "class_collision: k must be an integer >= 1, got 0"),
    ],
)
def test_diagnostics_as_functions_hold_to_their_ranges(measure, said):
    with pytest.raises(OptionError, match=said):
        measure(torch.eye(4), torch.tensor([0, 0, 1, 1]))
