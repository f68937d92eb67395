"""Small parts: text tables, intervals, seeds, tensors for a device, the Hub's messages, and what `dipole` exports."""

import json
import logging
import pickle
import random
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from importlib import import_module
from math import isnan

import numpy as np
import pytest
import torch
from scipy import stats

import dipole
from dipole.core.evaluation.intervals import bootstrap_interval, interquartile_mean
from dipole.core.utils.errors import ConfigError, DataError
from dipole.core.utils.hub import without_retry_messages
from dipole.core.utils.seeding import STREAMS, Seeds, isolated, rng_state, seed_everything, set_rng_state
from dipole.core.utils.text import number, results_table
from dipole.core.utils.transfer import constant, prefetched, tensors_in, to_device


def test_baselines_are_columns_beside_the_trained_numbers():
    values = {"linear/accuracy": 0.5, "knn/accuracy": None, "raw/linear/accuracy": 0.25, "wall": 12345.6}
    assert results_table(values).splitlines() == [
        "                    trained     raw",
        "linear/accuracy      0.5000  0.2500",
        "knn/accuracy     not finite",
        "wall              1.235e+04",
    ]
    assert results_table({"a": 0.0, "long": 0.00001}) == "a     0.0000\nlong   1e-05"
    assert number(-3.0) == "-3.0000"


def test_attempts_are_not_printed_and_errors_are(caplog):
    import huggingface_hub  # noqa: F401  (it sets up its logger when it is imported)

    client = logging.getLogger("huggingface_hub.utils")
    client.addHandler(caplog.handler)
    try:
        client.warning("before")
        with without_retry_messages():
            client.warning("Retrying in 8s [Retry 5/5].")
            client.error("broken")
        client.warning("after")
    finally:
        client.removeHandler(caplog.handler)
    assert list(dict.fromkeys(caplog.messages)) == ["before", "broken", "after"]


def test_one_batch_is_made_ahead_in_order_and_by_one_thread():
    made: list[tuple[int, int]] = []

    def items() -> Iterator[int]:
        for item in range(5):
            made.append((item, threading.get_ident()))
            yield item

    taken = prefetched(items())
    assert (next(taken), list(taken)) == (0, [1, 2, 3, 4])
    assert [number for number, _ in made] == [0, 1, 2, 3, 4]
    assert len({thread for _, thread in made} | {threading.get_ident()}) == 2


def test_what_goes_to_a_device_arrives_unchanged():
    cpu = torch.device("cpu")
    x = torch.arange(3.0)
    assert to_device(x, cpu) is x
    assert constant((1.0, 2.0), x) is constant((1.0, 2.0), x)
    nested = {"a": [x, (x, 1)], "b": json}
    assert sum(1 for _ in tensors_in(nested)) == 2


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 101])
def test_the_interquartile_mean_is_the_trimmed_one(n):
    values = np.random.default_rng(n).normal(size=n)
    assert interquartile_mean(values) == pytest.approx(stats.trim_mean(values, 0.25), rel=1e-14)


def test_the_interval_is_that_of_scipys_bootstrap():
    values = np.random.default_rng(0).exponential(size=30)
    low, high = bootstrap_interval(values, "mean", confidence=0.9)
    theirs = stats.bootstrap((values,), np.mean, confidence_level=0.9, method="percentile", random_state=1)
    assert low == pytest.approx(theirs.confidence_interval.low, abs=0.02)
    assert high == pytest.approx(theirs.confidence_interval.high, abs=0.02)
    assert bootstrap_interval(values, lambda drawn: np.median(drawn, axis=1)) != (low, high)


def test_several_samples_are_redrawn_each_by_itself():
    generator = np.random.default_rng(1)
    samples = [generator.normal(level, 0.1, size=20).tolist() for level in (0, 10)]
    low, high = bootstrap_interval(samples)
    assert 0 < high - low < 0.1
    assert bootstrap_interval(samples) == (low, high)
    assert bootstrap_interval(samples, seed=1) != (low, high)
    together_low, together_high = bootstrap_interval([*samples[0], *samples[1]])
    assert together_high - together_low > 2


def test_normal_samples_are_covered_about_as_often_as_it_says():
    generator = np.random.default_rng(2)
    intervals = [bootstrap_interval(generator.normal(size=40), draws=400, seed=i) for i in range(200)]
    assert 0.88 <= np.mean([low <= 0 <= high for low, high in intervals]) <= 0.99


def test_samples_without_an_interval_and_wrong_settings():
    assert all(map(isnan, bootstrap_interval([3.0])))
    assert all(map(isnan, bootstrap_interval([[3.0], [4.0]], "iqm")))
    with pytest.raises(ConfigError, match="between 0 and 1"):
        bootstrap_interval([1.0, 2.0], confidence=95)
    with pytest.raises(ConfigError, match="mean, iqm"):
        bootstrap_interval([1.0, 2.0], "median")


@pytest.mark.parametrize("wrong", [[], [1.0, float("nan")], ["a"], [[1.0], []], [[[1.0, 2.0]]]])
def test_what_is_no_sample_is_refused(wrong):
    with pytest.raises(DataError, match="finite numbers"):
        bootstrap_interval(wrong)


def drawn_numbers() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_streams_are_stable_and_differ():
    assert [getattr(Seeds(0), name) for name in STREAMS] == [1561419972, 1805441316, 1189083480, 199579254, 37680149]
    assert Seeds(0).stream("augment", 3, 7) == 1448436595
    found = {Seeds(root).stream(name, index) for root in range(20) for name in STREAMS for index in range(20)}
    assert len(found) == 20 * len(STREAMS) * 20
    assert all(0 <= seed < 2**31 for seed in found)
    assert Seeds(1).stream("data", 23) != Seeds(1).stream("data", 2, 3)
    seeds = Seeds(3)
    assert torch.equal(torch.rand(4, generator=seeds.torch("data", 1)), torch.rand(4, generator=seeds.torch("data", 1)))
    assert not torch.equal(torch.rand(4, generator=seeds.torch("data")), torch.rand(4, generator=seeds.torch("probe")))
    assert (seeds.numpy("env").random(4) == Seeds(3).numpy("env").random(4)).all()
    assert seeds.as_dict()["probe"] == seeds.probe


def test_global_state_is_restored_and_isolated():
    seed_everything(5)
    random.gauss(0, 1)
    np.random.randn()  # leaves a cached second normal
    state = rng_state()
    expected = (random.gauss(0, 1), float(np.random.randn()), *drawn_numbers())
    set_rng_state(state)
    assert (random.gauss(0, 1), float(np.random.randn()), *drawn_numbers()) == expected
    seed_everything(1)
    with isolated(9):
        inside = drawn_numbers()
    after = drawn_numbers()
    seed_everything(1)
    assert drawn_numbers() == after
    with isolated(9):
        assert drawn_numbers() == inside


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
