"""Optimizers, learning rates, and [train.schedule]: weights and options of terms that change with the step."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import quiet
from torch import Tensor, nn

from dipole.core.objectives.objective import Composite, Objective, objective
from dipole.core.objectives.registry import register, registry
from dipole.core.train import schedule
from dipole.core.train.config import TrainConfig
from dipole.core.train.metrics import read_metrics
from dipole.core.train.optimizer import LARS, build_optimizer, learning_rate
from dipole.core.train.recipe import load
from dipole.core.train.run_folder import RunFolder
from dipole.core.train.trained_run import load_run
from dipole.core.utils.errors import ConfigError

TEMPERATURE = "train.schedule.infonce.temperature=exponential(1, 0.1, start=2, end=8)"
BOTH = ("objective=infonce+dp", TEMPERATURE, 'train.schedule."dp.weight"=[[0, 0], [4, 0.2], [8, 0.1]]')


def run(recipe: Path, *overrides: str, runs: Path) -> tuple[Any, RunFolder]:
    record = quiet(recipe, "train.log_every=1", *overrides, runs=runs)
    return record, RunFolder(runs / record.hash)


def equal(one: RunFolder, other: RunFolder) -> bool:
    first, second = (load_run(folder)[1].module.state_dict() for folder in (one, other))
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("linear(1, 3)", [1.0, 1.5, 2.0, 3.0]),
        ("linear(1, 3, start=5, end=15)", [1.0, 1.0, 2.0, 3.0]),
        ("cosine(2, 0, end=10)", [2.0, 1 + math.cos(math.pi / 2), 0.0, 0.0]),
        ("exponential(1, 1e-4)", [1.0, 0.1, 1e-2, 1e-4]),
        ([[5, 1.0], [10, 2]], [1.0, 1.0, 2.0, 2.0]),
    ],
)
def test_values_at_0_5_10_and_20_of_20(text, expected):
    curve = schedule.read(text)
    assert [curve.at(when, 20.0) for when in (0.0, 5.0, 10.0, 20.0)] == pytest.approx(expected, abs=1e-15)
    assert schedule.read(curve.plain()) == curve


@pytest.mark.parametrize("entry", [each for each in registry.entries() if each.kind != "diagnostic"], ids=str)
def test_a_scheduled_option_gives_what_an_objective_built_with_it_gives(entry):
    """Of every option of every entry: the value is in force at the next call, or the option is refused."""
    generator = torch.Generator().manual_seed(3)
    one, two = (torch.randn(12, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    for option in entry.options:
        if float not in option.kinds or option.name.endswith("init"):  # of what is learned
            continue
        torch.manual_seed(0)
        moved: Composite = objective(entry.name, dim=8).double()
        value = getattr(moved.terms[0], option.name)
        if value is None or isinstance(value, Tensor):
            continue  # it follows another option, or is learned
        value = value * 0.75 + 0.01
        name = f"{entry.name}.{option.name}"
        if schedule.check({name: schedule.read(f"linear({value * 0.9!r}, {value!r})")}, moved, 1.0):
            assert name == "co2.temperature"  # consistency_temperature is this one where it is not given
            continue
        schedule.target(name, moved).set(value)
        if option.name == schedule.WEIGHT:
            continue  # the term's weight in the sum
        torch.manual_seed(0)
        built = objective(f"{entry.name}({option.name}={value!r})", dim=8).double()
        try:
            expected = built(one, two)
        except Exception as error:  # a layout that it does not take: the same answer
            with pytest.raises(type(error)):
                moved(one, two)
            continue
        assert torch.equal(moved(one, two).loss, expected.loss), option.name


def test_each_step_is_made_with_its_value(blobs, tmp_path):
    _, folder = run(blobs, *BOTH, runs=tmp_path)
    for line in [line for line in read_metrics(folder.metrics) if "train/loss" in line]:
        when = line["step"] - 1
        part = min(1, max(0, (when - 2) / 6))
        assert line["train/schedule.infonce.temperature"] == pytest.approx(0.1**part, rel=1e-5)
        weight = 0.2 * when / 4 if when < 4 else max(0.1, 0.2 - 0.1 * (when - 4) / 4)
        assert line["train/schedule.dp.weight"] == pytest.approx(weight, rel=1e-5, abs=1e-9)
        parts = line["train/loss.infonce"] + weight * line["train/loss.dp"]
        assert line["train/loss"] == pytest.approx(parts, rel=1e-4)


def test_a_constant_schedule_trains_as_the_option_does_under_another_name(blobs, tmp_path):
    fixed, folder = run(blobs, "objective=infonce(temperature=0.2)+0.3*dp", runs=tmp_path)
    moved, other = run(
        blobs, "objective=infonce+dp", "train.schedule.infonce.temperature=linear(0.2, 0.2)",
        "train.schedule.dp.weight=linear(0.3, 0.3)", runs=tmp_path,
    )  # fmt: skip
    assert equal(folder, other)
    plain, third = run(blobs, "objective=infonce+dp", runs=tmp_path)
    assert not equal(folder, third)
    assert len({fixed.hash, moved.hash, plain.hash}) == 3
    # What is evaluated again is the objective as it ended.
    _, _, ended = load_run(other)
    assert (ended.weights[1], ended.terms[0].temperature) == (0.3, 0.2)


def test_one_run_has_one_spelling(blobs):
    spellings = [
        [TEMPERATURE],
        ['train.schedule={"infonce.temperature"="exponential(1.0,  1e-1, end=8, start=2.0)"}'],
        ["train.schedule={infonce={temperature='exponential(1, 0.1, start=2, end=8)'}, learning_rate='constant'}"],
    ]
    configs = [load(blobs, each).config for each in spellings]
    assert len({config.hash for config in configs}) == 1
    as_table, as_value = (load(blobs, [f"train.schedule={each}"]) for each in ("{learning_rate='cosine'}", "cosine"))
    assert as_table.config == as_value.config
    both = load(blobs, ["train.schedule=cosine", TEMPERATURE]).config
    assert both.train.rate_schedule == "cosine"
    assert 'learning_rate = "cosine"' in both.to_toml()
    assert '"infonce.temperature" = "exponential(1.0, 0.1, start=2, end=8)"' in both.to_toml()


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("dp.weight=linear(0, 1)", "no term 'dp'"),
        ("infonce.temperatur=linear(1, 2)", "Did you mean 'temperature'"),
        ("infonce.similarity=linear(1, 2)", "nothing 'similarity' to schedule"),
        ("infonce.temperature=linear(0, 1)", "must be a number > 0"),
        ("infonce.temperature=linear(1, nan)", "is no schedule"),
        ("infonce.temperature=linear(1, 2, start=1, start=2)", "is no schedule"),
        ("infonce.temperature=[[0, 1], [0, 2]]", "must rise"),
        ("infonce.temperature=[]", "is no schedule"),
        ("infonce.temperature=0.5", "is no schedule"),
        ("infonce.temperature=linear(1, 2, start=5, end=4)", "0 <= start < end"),
        ("infonce.temperature=exponential(1, 0)", "above 0"),
        ("infonce.weight=linear(1, -1)", "must be >= 0"),
        ("learning_rate=cosin", "Did you mean 'cosine'"),
        ("ahead.temperature=linear(1, 0.5)", "ahead computes scale from it when it is built"),
    ],
)
def test_what_cannot_be_scheduled_is_said_before_training(blobs, entry, said):
    with registry.temporary():

        @register("ahead", formula="s", source="a test")
        class Ahead(Objective):
            """Keep a number made of an option."""

            def __init__(self, temperature: float = 0.5) -> None:
                super().__init__("cosine")
                self.temperature, self.scale = temperature, 1 / temperature

            def loss(self, positive: Tensor, rows: Any) -> Tensor:
                return -self.scale * positive.mean(1)

        chosen = "ahead" if entry.startswith("ahead") else "infonce"
        with pytest.raises(ConfigError, match=r"train\.schedule") as caught:
            load(blobs, [f"objective={chosen}", f"train.schedule.{entry}"])
    assert said in str(caught.value)


def rates(total: int, spe: int = 1, **settings: object) -> list[float]:
    length = {} if "epochs" in settings else {"steps": total}
    config = TrainConfig(learning_rate=2.0, **length, **settings)
    return [learning_rate(config, step, total, spe) for step in range(total)]


def test_schedules_are_their_formulas():
    assert rates(6, warmup=4.0) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])
    found = rates(8, schedule="cosine", warmup=2.0)
    assert (found[2], found[5]) == (pytest.approx(2.0), pytest.approx(1.0))
    assert found[7] == pytest.approx(1 + torch.tensor(5 / 6 * torch.pi).cos().item())
    assert all(a > b for a, b in pairwise(found[2:]))
    found = rates(12, spe=3, epochs=4, schedule="step", milestones=(1.0, 3.0), decay=0.5)
    assert found == pytest.approx([2.0] * 3 + [1.0] * 6 + [0.5] * 3)


@pytest.mark.parametrize(
    ("name", "kind", "more"),
    [
        ("adam", torch.optim.Adam, {"betas": (0.8, 0.9)}), ("adamw", torch.optim.AdamW, {"betas": (0.8, 0.9)}),
        ("sgd", torch.optim.SGD, {"momentum": 0.7}),
    ],
)  # fmt: skip
def test_built_optimizers_are_pytorchs(name, kind, more):
    config = TrainConfig(steps=1, optimizer=name, learning_rate=0.1, weight_decay=0.01, **more)
    found, expected = nn.Parameter(torch.arange(4.0)), nn.Parameter(torch.arange(4.0))
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    optimizer = build_optimizer(config, [found, frozen])
    plain = kind([expected], lr=0.1, weight_decay=0.01, foreach=False, **more)
    for _ in range(5):
        for weight, each in ((found, optimizer), (expected, plain)):
            each.zero_grad()
            (weight**3).sum().backward()
            each.step()
    torch.testing.assert_close(found, expected)
    assert frozen == 1


def test_lars_against_the_formula():
    torch.manual_seed(0)
    matrix, bias = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(3))
    w, b = matrix.detach().double().numpy().copy(), bias.detach().double().numpy().copy()
    optimizer = LARS([matrix, bias], lr=0.5, momentum=0.9, weight_decay=0.1, trust=0.01)
    v, u = 0 * w, 0 * b
    for step in range(4):
        gm, gb = torch.randn(3, 2), torch.randn(3)
        matrix.grad, bias.grad = gm.clone(), gb.clone()
        optimizer.step()
        g = gm.double().numpy() + 0.1 * w
        v = 0.9 * v + 0.5 * 0.01 * (w**2).sum() ** 0.5 / (g**2).sum() ** 0.5 * g
        u = 0.9 * u + 0.5 * gb.double().numpy()
        w, b = w - v, b - u
        assert torch.allclose(matrix.double(), torch.tensor(w), atol=1e-5), step
        assert torch.allclose(bias.double(), torch.tensor(b), atol=1e-5), step


def test_zero_weights_and_nothing_to_train():
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.ones(2, 2)
    LARS([weight], lr=0.5).step()
    assert torch.equal(weight, torch.full((2, 2), -0.5))
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing to train"):
        build_optimizer(TrainConfig(steps=1), frozen.parameters())
