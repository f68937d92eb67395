"""Steps that are played from a tape give what the ordinary way gives, and notice whatever changes."""

import copy
import gc
import pickle
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import dipole
from dipole.core.conformance.layouts import LAYOUTS, Layout, two_views
from dipole.core.objectives import repeated
from dipole.core.objectives.objective import Composite, Objective
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.registry import registry
from dipole.core.utils.errors import DipoleError

WIDTH = 6
NEEDED = repeated.RECORDED_AT + 2  # the step that is played first
NAMES = [entry.name for entry in registry.entries() if entry.kind != "diagnostic"]
TEXTS = [
    *NAMES,
    "infonce + 0.1*dp",
    "infonce(temperature=0.01)",
    "infonce(temperature=learned)",
    "infonce(similarity=bilinear, temperature=1) + 0.1*cllr(norm=nuclear)",
    "dcl(similarity=dot) + 2*align_uniform",
    "cacr(cost=rbf)",
    "blocks(loss=hinge)",
    "blocks(k=1)",
    "dp(reduction=mean)",
]


def build(text: str) -> Composite:
    torch.manual_seed(0)
    return dipole.objective(text, dim=WIDTH)


def result(outcome, wanted: list[Tensor]) -> list[Tensor | None]:
    """Loss, terms and gradients."""
    values = [outcome.loss.detach()]
    for term in outcome.terms.values():
        values += [term.value, term.left_out]
    if not outcome.loss.requires_grad:
        return [*values, *(None for _ in wanted)]
    return [*values, *torch.autograd.grad(outcome.loss, wanted, allow_unused=True)]


def assert_same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
            assert not a.requires_grad


def trusted(objective: Composite) -> int:
    return sum(step.trusted is not None for step in objective._steps._steps.values())


@pytest.mark.parametrize("layout", [pytest.param(each, id=each.name.replace(" ", "-")) for each in LAYOUTS[::2]])
@pytest.mark.parametrize("text", NAMES)
def test_every_step_gives_what_the_ordinary_way_gives(text: str, layout: Layout) -> None:
    objective = build(text)
    wide = {name: (*shape[:-1], WIDTH) for name, shape in layout.shapes.items()}
    for step in range(NEEDED + 1):
        torch.manual_seed(step)
        leaves = {name: torch.randn(shape).requires_grad_() for name, shape in wide.items()}
        wanted = [*leaves.values(), *objective.parameters()]
        try:
            ordinary = objective.evaluate(layout.build(**leaves))
        except DipoleError as error:
            with pytest.raises(type(error)):
                objective(layout.build(**leaves))
            continue
        outcome = objective(layout.build(**leaves))
        assert [(t.weight, t.note) for t in outcome.terms.values()] == [
            (t.weight, t.note) for t in ordinary.terms.values()
        ]
        assert_same(result(outcome, wanted), result(ordinary, wanted))


@pytest.mark.parametrize("text", [text for text in TEXTS if text not in ("blocks(k=1)", "cross_entropy", "regression")])
def test_two_views_are_played(text: str) -> None:
    objective = build(text)
    if not all(term.repeats for _, _, term in objective):
        pytest.skip("it does not say that it repeats")
    labels = "supervised" if any(word in text for word in ("supcon", "tuple")) else ""
    for step in range(NEEDED + 1):
        torch.manual_seed(step)
        views = [torch.randn(8, WIDTH).requires_grad_() for _ in range(2)]
        given = (Pairs.from_views(views, torch.arange(8) // 2),) if labels else views
        wanted = [*views, *objective.parameters()]
        expected = result(objective.evaluate(Pairs.from_views(views, torch.arange(8) // 2 if labels else None)), wanted)
        assert_same(result(objective(*given), wanted), expected)
    assert labels or trusted(objective) == 1


def warmed(text: str = "infonce + 0.1*dp", rows: int = 8) -> tuple[Composite, list[Tensor]]:
    """An objective that plays its steps on two views, and such views."""
    objective = build(text)
    views = [torch.randn(rows, WIDTH).requires_grad_() for _ in range(2)]
    for _ in range(NEEDED):
        objective(*views)
    assert trusted(objective) == 1
    return objective, views


def same_as_anew(objective: Composite, views: list[Tensor]) -> None:
    wanted = [*views, *objective.parameters()]
    assert_same(result(objective(*views), wanted), result(objective.evaluate(Pairs.from_views(views)), wanted))


def test_an_option_that_changes_is_noticed() -> None:
    objective, views = warmed()
    before = float(objective(*views).terms["dp"].value)
    objective.terms[1].delta_neg = 0.9
    same_as_anew(objective, views)
    assert float(objective(*views).terms["dp"].value) != before
    for _ in range(NEEDED):
        same_as_anew(objective, views)
    assert trusted(objective) == 1  # it was recorded again


def test_an_option_that_changes_at_every_step_is_followed() -> None:
    objective, views = warmed()
    for step in range(12):
        objective.terms[1].delta_neg = 0.5 + 0.01 * step
        same_as_anew(objective, views)
    assert trusted(objective) == 0


def test_weights_and_terms_that_change_are_noticed() -> None:
    objective, views = warmed()
    objective.weights[1] = 3.0
    same_as_anew(objective, views)
    objective.terms[0] = build("infonce(temperature=0.1)").terms[0]
    same_as_anew(objective, views)


def test_parameters_that_are_written_to_or_replaced_are_read_anew() -> None:
    objective, views = warmed("infonce(similarity=bilinear, temperature=1)")
    term = objective.terms[0]
    with torch.no_grad():
        term.W.add_(torch.randn_like(term.W))
    same_as_anew(objective, views)
    term.W = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
    same_as_anew(objective, views)
    for _ in range(NEEDED):
        same_as_anew(objective, views)
    assert trusted(objective) == 1
    term.W.requires_grad_(False)
    expected = result(objective.evaluate(Pairs.from_views(views)), views)
    assert_same(result(objective(*views), views), expected)
    term.W.requires_grad_(True)
    same_as_anew(objective, views)


def test_other_indices_of_the_same_shape_are_read_anew() -> None:
    objective = build("infonce")
    for step in range(NEEDED + 2):
        torch.manual_seed(step)
        x, y = torch.randn(4, WIDTH).requires_grad_(), torch.randn(9, WIDTH).requires_grad_()
        positives, dropped = torch.randint(0, 4, (4, 1)), torch.randint(4, 9, (4, 2))
        pairs = Pairs.cross(x, y[:4], y[4:], dropped=dropped)
        own = Pairs(x, y, positives=positives, dropped=dropped, labels=torch.zeros(4))
        for each in (pairs, own, (pairs, own)):
            assert_same(result(objective(each), [x, y]), result(objective.evaluate(each), [x, y]))


def test_second_derivatives_are_those_of_the_ordinary_way() -> None:
    objective, views = warmed("infonce(similarity=bilinear, temperature=1) + align_uniform")
    wanted = [*views, *objective.parameters()]

    def second(outcome) -> tuple[Tensor, ...]:
        grads = torch.autograd.grad(outcome.loss, wanted, create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in grads), wanted)

    for found, expected in zip(
        second(objective(*views)), second(objective.evaluate(Pairs.from_views(views))), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_without_gradient_under_autocast_and_in_inference_mode() -> None:
    objective, views = warmed()
    with torch.no_grad():
        for _ in range(NEEDED):
            assert not objective(*views).loss.requires_grad
    expected = objective.evaluate(Pairs.from_views(views)).loss
    with torch.autocast("cpu", torch.bfloat16):
        found = objective(*views).loss
        found.backward()
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    with torch.inference_mode():
        assert torch.equal(objective(*views).loss, expected)


def test_a_copy_and_a_pickle_remember_nothing() -> None:
    objective, views = warmed()
    for other in (copy.deepcopy(objective), pickle.loads(pickle.dumps(objective))):
        assert not other._steps._steps
        assert torch.equal(other(*views).loss, objective(*views).loss)


def test_large_steps_and_strange_tensors_go_the_ordinary_way() -> None:
    objective = build("infonce")
    for _ in range(NEEDED):
        objective(torch.randn(257, WIDTH), torch.randn(257, WIDTH))
    assert not objective._steps._steps


def test_what_is_wrong_is_said_at_every_step() -> None:
    objective, views = warmed()
    with pytest.raises(DipoleError, match="same width"):
        objective(views[0], torch.randn(8, WIDTH + 1))
    with pytest.raises(DipoleError, match="8 rows"):
        objective(views[0], torch.randn(7, WIDTH))
    with pytest.raises(DipoleError, match="at least two views"):
        objective(views[0])
    labelled = build("cross_entropy(classes=3)")
    for step in range(NEEDED + 1):
        labels = torch.tensor([0, 1, 2, 0] if step < NEEDED else [0, 1, 2, 3])
        pairs = Pairs.from_views([torch.randn(4, WIDTH), torch.randn(4, WIDTH)], labels)
        if step < NEEDED:
            labelled(pairs)
        else:
            with pytest.raises(DipoleError, match="takes labels 0 to 2"):
                labelled(pairs)


class Counted(Objective):
    """Counts how often it is asked, and says nothing of repeating."""

    repeats = False

    def __init__(self) -> None:
        super().__init__("cosine")
        self.asked = 0

    def loss(self, positive: Tensor, rows) -> Tensor:
        self.asked += 1
        return self.asked * positive.mean(1)


class Careless(Counted):
    """Says that it repeats, but does not."""

    repeats = True


class Silent(Careless):
    """Inherits from one that repeats and says nothing."""


class Listed(Counted):
    """Says that it repeats, and changes what it holds without its being another."""

    repeats = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def loss(self, positive: Tensor, rows) -> Tensor:
        self.seen.append(0)
        return len(self.seen) * positive.mean(1)


@pytest.mark.parametrize("kind", [Counted, Careless, Silent, Listed])
def test_a_term_that_does_not_repeat_is_asked_at_every_step(kind) -> None:
    objective = Composite([kind()], [1.0])
    views = [torch.randn(4, WIDTH) for _ in range(2)]
    values = [float(objective(*views).loss) for _ in range(NEEDED + 3)]
    # What recording asks besides is no step of the caller's.
    assert len({values[0] < values[1], *(a < b for a, b in pairwise(values))}) == 1


def test_training_is_the_same_wherever_it_is_taken_up() -> None:
    def steps(objective: Composite, weight: Tensor, first: int, last: int) -> Tensor:
        for step in range(first, last):
            source = torch.Generator().manual_seed(step)
            views = [torch.randn(8, 5, generator=source) @ weight for _ in range(2)]
            (grad,) = torch.autograd.grad(objective(*views).loss, weight)
            weight = (weight - 0.1 * grad).detach().requires_grad_()
        return weight

    start = torch.eye(5, WIDTH).requires_grad_()
    whole = steps(build("infonce + 0.1*dp"), start, 0, 12)
    half = steps(build("infonce + 0.1*dp"), start, 0, 7)
    assert torch.equal(whole, steps(build("infonce + 0.1*dp"), half, 7, 12))


def test_layouts_of_other_dtypes_are_steps_of_their_own() -> None:
    objective = build("infonce")
    layout = two_views(6, WIDTH)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for seed in range(NEEDED + 1):
            leaves = layout.leaves(dtype, seed)
            wanted = list(leaves.values())
            assert_same(
                result(objective(*wanted), wanted), result(objective.evaluate(Pairs.from_views(wanted)), wanted)
            )
    assert trusted(objective) == 3


def test_playing_loads_no_compiler() -> None:
    """Beside a loss at work, what PyTorch loads for its compiler is most of a process's memory."""
    script = """
import sys, torch, dipole
from dipole.core.objectives import repeated
objective = dipole.objective("infonce + 0.1*dp")
views = [torch.randn(8, 4, requires_grad=True) for _ in range(2)]
for _ in range(repeated.RECORDED_AT + 2):
    objective(*views).loss.backward()
(step,) = objective._steps._steps.values()
assert step.trusted
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def two_leaves(seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(5, WIDTH).requires_grad_() for _ in range(2)]


def test_checkpointed_steps_save_as_much_when_they_are_taken_again() -> None:
    objective = build("infonce(temperature=learned)")
    for step in range(NEEDED + 2):
        views = two_leaves(step)
        wanted = [*views, *objective.parameters()]
        expected = torch.autograd.grad(objective.evaluate(Pairs.from_views(views)).loss, wanted)
        loss = checkpoint(lambda *given: objective(*given).loss, *views, use_reentrant=False)
        assert_same(list(torch.autograd.grad(loss, wanted)), list(expected))


def test_hooks_of_parameters_are_called_once_a_step() -> None:
    objective = build("infonce(temperature=learned)")
    (scale,) = objective.parameters()
    called: list[Tensor] = []
    scale.register_hook(called.append)
    for step in range(NEEDED + 2):
        objective(*two_leaves(step)).loss.backward()
        assert len(called) == step + 1


def test_parameters_of_another_dtype_are_noticed() -> None:
    objective = build("infonce(similarity=bilinear)")
    for step in range(NEEDED):
        objective(*two_leaves(step))
    assert trusted(objective) == 1
    objective.double()
    for step in range(NEEDED + 1):
        views = two_leaves(step)
        wanted = [*views, *objective.parameters()]
        ordinary = objective.evaluate(Pairs.from_views(views))
        assert_same(result(objective(*views), wanted), result(ordinary, wanted))


@pytest.mark.parametrize("make", [lambda views: views, lambda views: [Pairs.from_views(views)]], ids=["views", "pairs"])
def test_a_kept_loss_keeps_no_embeddings(make) -> None:
    objective = build("infonce")
    kept = []
    for step in range(NEEDED + 1):
        views = [each * 1 for each in two_leaves(step)]
        kept.append(objective(*make(views)).loss)
        kept[-1].backward()
        alive = weakref.ref(views[0])
        del views
        gc.collect()
        assert alive() is None
    assert trusted(objective) == 1


def test_pairs_with_attributes_of_somebody_s_own_go_the_ordinary_way() -> None:
    objective = build("infonce")
    for _ in range(NEEDED + 1):
        pairs = replace(Pairs.cross(*torch.randn(2, 6, WIDTH).requires_grad_()))
        object.__setattr__(pairs, "note", ["a list"])
        assert torch.equal(objective(pairs).loss, objective.evaluate(pairs).loss)
    assert not trusted(objective)


def test_threads_share_an_objective_while_its_options_change() -> None:
    objective = build("infonce + 0.1*dp")
    wrong: list[object] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for step in range(60):
            views = [torch.randn(4 + step % 3, WIDTH, generator=generator, requires_grad=True) for _ in range(2)]
            try:
                loss = objective(*views).loss
                loss.backward()
                if not torch.equal(loss, objective.evaluate(Pairs.from_views(views)).loss) and not changing.is_set():
                    wrong.append((seed, step))
            except Exception as error:
                wrong.append(error)

    changing = threading.Event()
    for _ in range(2):
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for each in threads:
            each.start()
        if changing.is_set():
            for number in range(40):
                objective.terms[1].delta_neg = 0.5 + 0.01 * number
        for each in threads:
            each.join()
        changing.set()
    assert wrong == []
