"""Things that change or are watched along a run: optimizers, rates, [train.schedule], gradients of terms, collapse."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from blobs_domain import BlobsAdapter
from runs import lines, quiet, weights
from torch import Tensor, nn

from dipole import Composite, ConfigError, DipoleError, Objective, objective
from dipole.core.objectives.registry import register, registry
from dipole.core.train import schedule
from dipole.core.train.callbacks import Health, gradient_lengths
from dipole.core.train.config import TrainConfig
from dipole.core.train.metrics import read_metrics
from dipole.core.train.model import load_run
from dipole.core.train.recipe import load_recipe
from dipole.core.train.run_folder import RunFolder
from dipole.core.train.update import LARS, build_optimizer, learning_rate
from dipole.core.utils.seeding import Seeds

TEMPERATURE = "train.schedule.infonce.temperature=exponential(1, 0.1, start=2, end=8)"
BOTH = ("objective=infonce+dp", TEMPERATURE, 'train.schedule."dp.weight"=[[0, 0], [4, 0.2], [8, 0.1]]')


def run(recipe: Path, *overrides: str, runs: Path) -> tuple[Any, RunFolder]:
    record = quiet(recipe, "train.log_every=1", *overrides, runs=runs)
    return record, RunFolder(runs / record.hash)


def equal(one: RunFolder, other: RunFolder) -> bool:
    first, second = (load_run(folder)[1].module.state_dict() for folder in (one, other))
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("text", "expected"), [
    ("linear(1, 3)", [1.0, 1.5, 2.0, 3.0]), ("linear(1, 3, start=5, end=15)", [1.0, 1.0, 2.0, 3.0]),
    ("cosine(2, 0, end=10)", [2.0, 1 + math.cos(math.pi / 2), 0.0, 0.0]),
    ("exponential(1, 1e-4)", [1.0, 0.1, 1e-2, 1e-4]), ([[5, 1.0], [10, 2]], [1.0, 1.0, 2.0, 2.0]),
])  # fmt: skip
def test_values_at_0_5_10_and_20_of_20(text, expected):
    curve = schedule.read(text)
    assert [curve.at(when, 20.0) for when in (0.0, 5.0, 10.0, 20.0)] == pytest.approx(expected, abs=1e-15)
    assert schedule.read(curve.plain()) == curve


@pytest.mark.parametrize("entry", [each for each in registry.entries() if each.kind != "diagnostic"], ids=str)
def test_a_scheduled_option_gives_what_an_objective_built_with_it_gives(entry):
    """Of every option of every entry: the value is in force at the next call, or the option is refused."""
    one, two = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for option in entry.options:
        if float not in option.kinds or option.name.endswith("init"):  # of what is learned
            continue
        torch.default_generator.manual_seed(0)
        moved: Composite = objective(entry.name, dim=8).double()
        value = getattr(moved.terms[0], option.name)
        if value is None or isinstance(value, Tensor):
            continue  # it follows another option, or is learned
        value = value * 0.75 + 0.01
        name = f"{entry.name}.{option.name}"
        if schedule.check({name: schedule.read(f"linear({value * 0.9!r}, {value!r})")}, moved, 1.0):
            assert name == "co2.temperature"  # consistency_temperature is this one where it is not given
            continue
        if option.name == schedule.WEIGHT:
            continue  # the term's weight in the sum
        setattr(moved.terms[schedule.target(name, moved)[0]], option.name, value)
        torch.default_generator.manual_seed(0)
        built = objective(f"{entry.name}({option.name}={value!r})", dim=8).double()
        try:
            expected = built(one, two).loss
        except DipoleError as error:  # a layout that it does not take: the same answer
            with pytest.raises(type(error)):
                moved(one, two)
        else:
            assert torch.equal(moved(one, two).loss, expected), option.name


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
    # The objective as it ended is evaluated again.
    _, _, ended = load_run(other)
    assert (ended.weights[1], ended.terms[0].temperature) == (0.3, 0.2)


def test_one_run_has_one_spelling(blobs):
    spellings = [
        TEMPERATURE, 'train.schedule={"infonce.temperature"="exponential(1.0,  1e-1, end=8, start=2.0)"}',
        "train.schedule={infonce={temperature='exponential(1, 0.1, start=2, end=8)'}, learning_rate='constant'}",
    ]  # fmt: skip
    assert len({load_recipe(blobs, [each]).config.hash for each in spellings}) == 1
    as_table, as_value = (
        load_recipe(blobs, [f"train.schedule={each}"]) for each in ("{learning_rate='cosine'}", "cosine")
    )
    assert as_table.config == as_value.config
    both = load_recipe(blobs, ["train.schedule=cosine", TEMPERATURE]).config
    assert both.train.rate_schedule == "cosine"
    assert 'learning_rate = "cosine"' in both.to_toml()
    assert '"infonce.temperature" = "exponential(1.0, 0.1, start=2, end=8)"' in both.to_toml()


@pytest.fixture
def ahead():
    """An objective that keeps a number made of an option."""
    with registry.temporary():

        @register("ahead", formula="s", source="a test")
        class Ahead(Objective):
            """Keep a number made of an option."""

            def __init__(self, temperature: float = 0.5) -> None:
                super().__init__("cosine")
                self.temperature, self.scale = temperature, 1 / temperature

            def loss(self, positive: Tensor, rows: Any) -> Tensor:
                return -self.scale * positive.mean(1)

        yield


@pytest.mark.parametrize(("entry", "said"), [
    ("dp.weight=linear(0, 1)", "no term 'dp'"), ("infonce.temperatur=linear(1, 2)", "Did you mean 'temperature'"),
    ("infonce.similarity=linear(1, 2)", "nothing 'similarity' to schedule"),
    ("infonce.temperature=linear(0, 1)", "must be a number > 0"),
    *((f"infonce.temperature={wrong}", "is no schedule") for wrong in ("linear(1, nan)", "[]", "0.5")),
    ("infonce.temperature=linear(1, 2, start=1, start=2)", "is no schedule"),
    ("infonce.temperature=points(1, 2)", "'points(1, 2)' is no schedule"),
    ("infonce.temperature=[[0, 1], [0, 2]]", "must rise"), ("learning_rate=cosin", "Did you mean 'cosine'"),
    ("infonce.temperature=linear(1, 2, start=5, end=4)", "0 <= start < end"),
    ("infonce.temperature=exponential(1, 0)", "above 0"), ("infonce.weight=linear(1, -1)", "must be >= 0"),
    ("ahead.temperature=linear(1, 0.5)", "ahead computes scale from it when it is built"),
])  # fmt: skip
def test_what_cannot_be_scheduled_is_said_before_training(blobs, ahead, entry, said):
    chosen = "ahead" if entry.startswith("ahead") else "infonce"
    with pytest.raises(ConfigError, match=r"train\.schedule") as caught:
        load_recipe(blobs, [f"objective={chosen}", f"train.schedule.{entry}"])
    assert said in str(caught.value)


def rates(total: int, spe: int = 1, **settings: object) -> list[float]:
    length = {} if "epochs" in settings else {"steps": total}
    config = TrainConfig(learning_rate=2.0, **length, **settings)
    return [learning_rate(config, step, total, spe) for step in range(total)]


def test_schedules_are_their_formulas():
    assert rates(6, warmup=4.0) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])
    found = rates(8, schedule="cosine", warmup=2.0)[2:]
    assert found == pytest.approx([1 + math.cos(step / 6 * math.pi) for step in range(6)])
    found = rates(12, spe=3, epochs=4, schedule="step", milestones=(1.0, 3.0), decay=0.5)
    assert found == pytest.approx([2.0] * 3 + [1.0] * 6 + [0.5] * 3)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_built_optimizers_are_pytorchs(kind):
    more = {"momentum": 0.7} if kind is torch.optim.SGD else {"betas": (0.8, 0.9)}
    config = TrainConfig(steps=1, optimizer=kind.__name__.lower(), learning_rate=0.1, weight_decay=0.01, **more)
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
    torch.default_generator.manual_seed(0)
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
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.ones(2, 2)
    LARS([weight], lr=0.5).step()
    assert torch.equal(weight, torch.full((2, 2), -0.5))
    with pytest.raises(ConfigError, match="nothing to train"):
        build_optimizer(TrainConfig(steps=1), nn.Linear(2, 2).requires_grad_(False).parameters())


SUM = "dp(reduction=anchor_sum)"


def ratios(runs: Path, name: str = "grad/dp") -> dict[int, float | None]:
    return {line["step"]: line[name] for line in lines(runs) if name in line}


def length(loss: Tensor, parameters: list[Tensor]) -> float:
    grads = torch.autograd.grad(loss, parameters, retain_graph=True)
    return math.sqrt(sum(float(g.square().sum()) for g in grads))


def test_the_ratios_are_those_of_the_formulas(blobs, tmp_path):
    text = f"infonce(temperature=0.3) + 0.7*{SUM}"
    overrides, terms = ("blobs.dropout=0", "train.evaluate_every=2", "train.steps=5"), objective(text)
    overrides += (f"objective={text}",)
    record = quiet(blobs, *overrides, runs=tmp_path / "runs")
    settings, seeds, cpu = load_recipe(blobs, overrides).config.settings, Seeds(0), torch.device("cpu")
    torch.default_generator.manual_seed(seeds.model)
    adapter = BlobsAdapter(settings, seed=seeds, device=cpu, workdir=tmp_path, batch_size=16)
    parameters = list(adapter.module.double().parameters())
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    expected = {}
    for step in range(5):
        views = list(adapter.batches(step // 4))[step % 4][0].double()
        infonce, dp = terms(*adapter.module(views.flatten(0, 1)).chunk(2)).weighted.values()
        expected[step + 1] = length(dp, parameters) / length(infonce, parameters)
        optimizer.zero_grad()
        (infonce + dp).backward()
        optimizer.step()
    found = ratios(tmp_path / "runs")
    assert list(found) == [1, 2, 4, 5]
    assert found == pytest.approx({step: expected[step] for step in found}, rel=1e-3)
    assert record.diagnostics["grad/dp"] == pytest.approx(expected[5], rel=1e-3)


@pytest.mark.parametrize("overrides", [
    (f"objective=infonce(temperature=learned, init=0.07) + {SUM}", "blobs.queue=24"),
    ("objective=infonce + 0.1*cllr(dim=8, solver=proximal) + swav", "train.microbatch=5"),
    (f"objective=infonce + {SUM}", "train.activation_checkpointing=true", "train.precision=16-mixed"),
    (f"objective=infonce + {SUM}", "train.schedule.dp.weight=linear(0, 1)", "train.clip=0.1"),
])  # fmt: skip
def test_measuring_changes_no_bit_of_training(blobs, tmp_path, monkeypatch, overrides):
    overrides = (*overrides, "train.evaluate_every=2")
    quiet(blobs, *overrides, runs=tmp_path / "with")
    assert any(name.startswith("grad/") for line in lines(tmp_path / "with") for name in line)
    monkeypatch.setattr(Health, "measure_step", lambda *_: None)
    quiet(blobs, *overrides, runs=tmp_path / "without")
    torch.testing.assert_close(weights(tmp_path / "with"), weights(tmp_path / "without"), rtol=0, atol=0)
    of_training = []
    for runs in (tmp_path / "with", tmp_path / "without"):
        kept = [{name: value for name, value in line.items() if "grad/" not in name} for line in lines(runs)]
        of_training.append([line for line in kept if len(line) > 2])
    assert of_training[0] == of_training[1]


def test_a_regularizer_that_dominates_is_named_once(blobs, tmp_path, capsys):
    record = quiet(blobs, f"objective=infonce + 8*{SUM}", "train.evaluate_every=2", runs=tmp_path)
    largest = max(value for value in ratios(tmp_path).values() if value is not None)
    assert largest > 6
    (note,) = [note for note in record.notes if "dominates" in note]
    assert note == (
        f"the term 'dp' dominates: its gradient was {largest:.3g} times as long as that of infonce. A weight of 4 "
        "instead of 8 would halve that"
    )
    assert capsys.readouterr().err.count(f"warning: {note}.") == 1
    assert quiet(blobs, f"objective=infonce + 4*{SUM}", runs=tmp_path / "halved").status == "done"
    first, half = (next(iter(ratios(runs).values())) for runs in (tmp_path, tmp_path / "halved"))
    assert half == pytest.approx(first / 2, rel=1e-5)
    # A scheduled weight is the one of the step.
    curve = ("train.schedule.dp.weight=linear(0, 10)", "train.evaluate_every=5", f"objective=infonce + {SUM}")
    (note,) = [note for note in quiet(blobs, *curve, runs=tmp_path / "curve").notes if "dominates" in note]
    assert ratios(tmp_path / "curve")[1] == 0
    assert any(f"{weight / 2:.4g} instead of {weight:.4g}" in note for weight in (40 / 9, 5, 4, 9, 10))


@pytest.mark.parametrize(("text", "logged"), [
    ("infonce", set()), ("infonce + 0.1*dp(reduction=mean)", {"dp"}),
    ("infonce + 5*dp(reduction=mean)", {"dp"}), ("infonce + 0.1*cllr", {"cllr"}),
    (f"5*{SUM}", set()),  # no base to compare with
    (f"infonce + triplet + 0.01*{SUM}", {"infonce", "triplet", "dp"}),
    (f"infonce + 0.01*{SUM} + 0.01*{SUM}", {"dp.0", "dp.1"}),
])  # fmt: skip
def test_what_is_compared(blobs, tmp_path, text, logged):
    record = quiet(blobs, f"objective={text}", runs=tmp_path)
    found = {name for line in lines(tmp_path) for name in line}
    assert {name.removeprefix("grad/") for name in found if name.startswith("grad/")} == logged
    assert not any("dominates" in note for note in record.notes)


def test_a_base_without_gradient_dominates_nothing_and_an_objective_alone_is_compared(blobs, tmp_path, monkeypatch):
    overrides = (f"objective=triplet(margin=0) + {SUM}", "blobs.noise=0", "blobs.dropout=0")  # positives coincide
    record = quiet(blobs, *overrides, runs=tmp_path / "coinciding")
    assert None in ratios(tmp_path / "coinciding").values()
    assert not any("dominates" in note for note in record.notes)
    plain = BlobsAdapter.__init__

    def frozen(adapter: BlobsAdapter, *args: Any, **kwargs: Any) -> None:
        plain(adapter, *args, **kwargs)
        adapter.module.requires_grad_(False)

    monkeypatch.setattr(BlobsAdapter, "__init__", frozen)
    quiet(blobs, f"objective=infonce(similarity=bilinear) + {SUM}", runs=tmp_path / "frozen")
    assert set(ratios(tmp_path / "frozen").values()) == {0}  # W is not seen by polarization


@pytest.mark.parametrize(("text", "collapses"), [("infonce", False), ("tuple", False), ("regression", True)])
def test_embeddings_that_collapse_are_named_once(blobs, tmp_path, capsys, text, collapses):
    overrides = ("train.steps=200", "train.evaluate_every=50", "blobs.dropout=0")
    record = quiet(blobs, f"objective={text}", *overrides, runs=tmp_path)
    notes = [note for note in record.notes if note.startswith("the embeddings have collapsed: mean distance ")]
    assert len(notes) == len(record.notes) == collapses
    assert capsys.readouterr().err.count("have collapsed") == collapses


def test_lengths_and_weighted_terms():
    a, b = (torch.nn.Parameter(torch.tensor([3.0, 4.0])) for _ in range(2))
    weighted = {"one": (a * a).sum() / 2, "two": 2 * (b * b).sum(), "none": torch.zeros(())}
    for names, expected in ((["one"], 5), (["one", "two"], math.hypot(5, 20))):
        base, lengths = gradient_lengths(weighted, names, [a, b])
        assert base == pytest.approx(expected)
        assert lengths == {"one": 5, "two": 20, "none": 0}
    z = torch.randn(2, 6, 4, requires_grad=True)
    outcome = objective(f"infonce + 0.3*{SUM}")(z[0], z[1])
    assert list(outcome.weighted) == ["infonce", "dp"]
    torch.testing.assert_close(sum(outcome.weighted.values()), outcome.loss)
    assert outcome.weighted["dp"].requires_grad
