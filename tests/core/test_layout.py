"""The shape of the package, what it exports and what an import costs. Small parts: text, intervals, seeds, devices."""

import ast
import json
import logging
import os
import pickle
import random
import re
import subprocess
import sys
import threading
import tomllib
import traceback
from collections.abc import Iterator
from functools import cache, partial
from importlib import import_module
from math import isnan
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import dipole
from dipole.core.evaluation.intervals import bootstrap_interval, interquartile_mean
from dipole.core.utils import machine
from dipole.core.utils.download import without_retry_messages
from dipole.core.utils.errors import ConfigError, DataError
from dipole.core.utils.seeding import STREAMS, Seeds, isolated, rng_state, seed_everything, set_rng_state
from dipole.core.utils.text import number, results_table
from dipole.core.utils.transfer import constant, prefetched, tensors_in, to_device
from tests.runs import refused

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {
    "core": {"core"}, "vision": {"core", "vision"}, "text": {"core", "text"}, "rl": {"core", "rl"},
    "benchmarks": {"core", "vision", "text", "rl", "benchmarks"},
}  # fmt: skip
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Scripts of the checkout, which are not in the wheel.
SCRIPTS = [ROOT / "benchmarks" / name for name in ("soak", "speed", "studies")]
FILES = {folder: sorted((ROOT / folder).rglob("*.py")) for folder in ALLOWED}
EVERY = [path for files in FILES.values() for path in files]
PACKAGES = sorted(
    ".".join(("dipole", *path.parent.relative_to(ROOT).parts))
    for path in EVERY
    if path.name == "__init__.py" and path.parent not in SCRIPTS
)


@cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path):
    """Every node of the syntax tree of a file."""
    return list(ast.walk(tree(path)))


def module_of(path):
    return ".".join(("dipole", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def test_packages_are_installed_and_imported_under_one_name():
    assert "core" not in sys.modules
    assert PROJECT["tool"]["setuptools"]["packages"] == ["dipole", *PACKAGES]
    scripts = "|".join(path.name for path in SCRIPTS)
    for path in EVERY:
        assert path.with_name("__init__.py").exists(), f"{path} is in no package"
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module:
                assert node.module.split(".")[0] not in ALLOWED, path
        assert path.parent in SCRIPTS or not re.search(rf"dipole\.benchmarks\.({scripts})\b", path.read_text()), path
        drawn = re.search(r"^(import|from) (matplotlib|altair)\b", path.read_text(), re.MULTILINE)
        assert path not in FILES["core"] or not drawn, (
            f"only extras install a chart library: {path} must import it late"
        )


def layers():
    (contract,) = PROJECT["tool"]["importlinter"]["contracts"]
    return [re.split(r" \| ", layer) for layer in contract["layers"]]


def room_of(name):
    """The level, from the top, and the room that a dotted name lies in, or None."""
    rooms = [(level, room) for level, layer in enumerate(layers()) for room in layer]
    return next(((level, room) for level, room in rooms if f"{name}.".startswith(f"{room}.")), None)


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_names_in_text_point_down_too(folder):
    """A module named in a string is an import that no linter sees."""
    for path in FILES[folder]:
        own = room_of(module_of(path))
        for text in [n.value for n in nodes(path) if isinstance(n, ast.Constant) and type(n.value) is str]:
            if folder == "core":
                assert not re.search(r"\bdipole\.(vision|text|rl|benchmarks)\b", text), (path, text)
            if re.fullmatch(r"dipole(\.\w+)+(:\w+)?", text) and own is not None:
                named = room_of(text.partition(":")[0])
                assert named is None or named[0] > own[0] or named[1] == own[1], (path, text)


@pytest.mark.parametrize("folder", ["vision", "text", "rl", "core"])
def test_nobody_asks_for_a_framework_or_an_objective_by_name(folder):
    """Each says itself what is special about it, so that another of its kind can say the same."""
    for path in FILES[folder]:
        for node in nodes(path):
            if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute):
                asked = node.left.attr in ("method", "registered_name", "objective")
                texts = [each.value for each in node.comparators if isinstance(each, ast.Constant)]
                assert not asked or not [text for text in texts if text and text != "none"], (path, node.lineno)


def test_the_places_that_contributing_names_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:core|vision|text|rl|benchmarks|tests)/[\w./]*)`", text))
    assert len(named) > 12
    assert not [place for place in sorted(named) if not (ROOT / place).exists()]


def imports_of(path, modules):
    """Modules of dipole that a file imports, inside functions and for type checkers included."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in names}
    return found & modules.keys()


def test_every_room_has_its_layer_and_there_is_no_import_cycle():
    rooms = {name for name in PACKAGES if name.count(".") == 1 or re.fullmatch(r"dipole\.core\.\w+", name)}
    assert {name for layer in layers() for name in layer} == rooms - {"dipole.core"}
    modules = {module_of(path): path for path in EVERY}
    waiting = {name: imports_of(path, modules) - {name} for name, path in modules.items()}
    core = [path for name, path in modules.items() if name.startswith("dipole.core.")]
    assert not [path for path in core if imports_of(path, {"dipole": None})]
    while free := [name for name, needs in waiting.items() if not needs & waiting.keys()]:
        for name in free:
            del waiting[name]
    assert not waiting, f"a cycle is among {sorted(waiting)}"


@pytest.mark.slow
def test_a_system_without_posix_imports_everything_trains_and_finds_every_test(tmp_path):
    """On Windows a module of tests that cannot be imported stops the whole run."""
    pytest.importorskip("PIL")
    program = Path(__file__).with_name("without_posix.py")
    done = subprocess.run([sys.executable, program, tmp_path], capture_output=True, text=True, check=False)
    said = done.stdout[-5000:] + done.stderr
    assert done.stdout.startswith("every module\n"), said
    assert "\ncodes 0 0 0 0\n" in done.stdout, said
    assert done.returncode == 0, said
    assert len(re.findall(r"^tests/\S+\.py: \d+$", done.stdout, re.MULTILINE)) > 100


def test_baselines_are_columns_beside_the_trained_numbers():
    values = {"linear/accuracy": 0.5, "knn/accuracy": None, "raw/linear/accuracy": 0.25, "wall": 12345.6}
    assert results_table(values).splitlines() == [
        "                    trained     raw", "linear/accuracy      0.5000  0.2500", "knn/accuracy     not finite",
        "wall              1.235e+04",
    ]  # fmt: skip
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
    x = torch.arange(3.0)  # what goes to a device arrives unchanged
    assert to_device(x, torch.device("cpu")) is x
    assert constant((1.0, 2.0), x) is constant((1.0, 2.0), x)
    assert sum(1 for _ in tensors_in({"a": [x, (x, 1)], "b": json})) == 2


def test_intervals_are_those_of_scipy():
    for n in (1, 2, 3, 4, 7, 8, 101):
        values = np.random.default_rng(n).normal(size=n)
        assert interquartile_mean(values) == pytest.approx(stats.trim_mean(values, 0.25), rel=1e-14)
    values = np.random.default_rng(0).exponential(size=30)
    trimmed = partial(stats.trim_mean, proportiontocut=0.25)
    theirs = stats.bootstrap((values,), trimmed, confidence_level=0.9, method="percentile", random_state=1)
    assert bootstrap_interval(values, 0.9) == pytest.approx(theirs.confidence_interval, abs=0.02)


def test_an_interval_covers_as_often_as_it_says():
    generator = np.random.default_rng(1)
    sample = generator.normal(size=20).tolist()
    assert bootstrap_interval(sample) == bootstrap_interval(sample) != bootstrap_interval(sample, seed=1)
    intervals = [bootstrap_interval(generator.normal(size=40), draws=400, seed=i) for i in range(200)]
    assert 0.88 <= np.mean([low <= 0 <= high for low, high in intervals]) <= 0.99
    assert all(map(isnan, bootstrap_interval([3.0])))
    refused(ConfigError, "between 0 and 1", bootstrap_interval, [1.0, 2.0], confidence=95)
    for wrong in ([], [1.0, float("nan")], ["a"], [[1.0], []], [[1.0, 2.0]]):
        refused(DataError, "finite numbers", bootstrap_interval, wrong)


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


def test_exports_what_a_plugin_author_needs():
    for name in PROMISED:
        assert getattr(dipole, name).__name__ == name
    assert {*PROMISED, *import_module("dipole.core.utils.errors").__all__} <= set(dipole.__all__)
    for module in (dipole, dipole.evaluation):
        assert all(callable(getattr(module, name)) or module is dipole for name in module.__all__)
    for name in ("evaluation", "evaluation.diagnostics", "evaluation.theory.report"):
        assert import_module(f"dipole.{name}") is import_module(f"dipole.core.{name}")
    for module, name, near in ((dipole, "objectiv", "objective"), (dipole.evaluation, "knn", "knn_probe")):
        refused(AttributeError, f"no attribute '{name}'; it has .*{near}", getattr, module, name)


def test_errors_have_their_public_name_and_suggest_no_diagnostic():
    with pytest.raises(dipole.SpecError) as caught:
        dipole.objective("infonce + 0.1*dp(delta_pos=0.6)")
    assert "".join(traceback.format_exception_only(caught.value)).startswith("dipole.SpecError: dp: delta_pos")
    assert type(pickle.loads(pickle.dumps(caught.value))) is dipole.SpecError
    with pytest.raises(dipole.SpecError, match="unknown name 'uniformty'") as caught:
        dipole.objective("uniformty")
    assert "'uniformity'" not in str(caught.value)


def printed(code: str) -> str:
    command = [sys.executable, "-c", f"from dipole.core.utils.machine import *; {code}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_peak_is_what_was_held_and_not_what_is():
    held = "before = peak_memory(); held = bytearray(300 << 20); held[::4096] = b'x' * len(held[::4096]); del held"
    assert 290 << 20 < int(printed(f"{held}; print(peak_memory() - before)")) < 400 << 20


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_processors_are_those_that_may_be_used():
    one = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    assert printed(f"{one}; print(processors())") == "1\n"


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="only Linux has this file")
def test_free_memory_is_at_most_what_the_system_says():
    (available,) = re.findall(r"^MemAvailable: +(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert 0 < machine.free_memory() < 1.1 * 1024 * int(available)
