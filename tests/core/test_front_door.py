"""What plug-in authors import from `dipole`."""

import pickle
import subprocess
import sys
import traceback
from importlib import import_module

import pytest

import dipole

PROMISED = (
    *("objective", "Objective", "Composite", "Outcome", "Pairs", "Rows", "register", "Range", "cached", "compute_loss"),
    *("check_objective", "LogSumExp", "Softplus", "SoftmaxMean", "Sum", "Count", "Between", "Extreme", "Statistic"),
    *("DipoleError", "SpecError", "PairsError", "OptionError", "RegistryError", "ConfigError", "DataError"),
    *("ReceivedError", "EngineError", "TrainingError", "CheckpointError", "RecordError"),
)


@pytest.mark.parametrize("name", PROMISED)
def test_exports_what_a_plugin_author_needs(name):
    assert getattr(dipole, name).__name__ == name
    assert name in dipole.__all__


def test_every_listed_name_and_every_error_exists():
    for name in dipole.__all__:
        assert hasattr(dipole, name), name
    errors = import_module("dipole.core.utils.errors")
    assert set(errors.__all__) <= set(dipole.__all__)
    with pytest.raises(AttributeError, match=r"no attribute 'objectiv'; it has .*objective"):
        dipole.objectiv  # noqa: B018


@pytest.mark.parametrize("name", ["evaluation", "evaluation.diagnostics", "evaluation.probes"])
def test_evaluation_is_the_same_module_under_both_names(name):
    assert import_module(f"dipole.{name}") is import_module(f"dipole.core.{name}")


def test_evaluation_exports_probes_and_diagnostics():
    for name in dipole.evaluation.__all__:
        assert callable(getattr(dipole.evaluation, name)), name
    with pytest.raises(AttributeError, match=r"no attribute 'knn'; it has .*knn_probe"):
        dipole.evaluation.knn  # noqa: B018


def test_import_loads_no_torch():
    script = (
        "import sys, dipole, dipole.core.evaluation as evaluation; dir(dipole); dir(evaluation); "
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_errors_have_their_public_name_and_suggest_no_diagnostic():
    with pytest.raises(dipole.SpecError) as caught:
        dipole.objective("infonce + 0.1*dp(delta_pos=0.6)")
    assert "".join(traceback.format_exception_only(caught.value)).startswith("dipole.SpecError: dp: delta_pos")
    assert type(pickle.loads(pickle.dumps(caught.value))) is dipole.SpecError
    with pytest.raises(dipole.SpecError, match="unknown name 'uniformty'") as caught:
        dipole.objective("uniformty")
    assert "'uniformity'" not in str(caught.value)
