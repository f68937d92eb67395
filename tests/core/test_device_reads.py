"""No objective reads a result back from the device, for any kind of pairs. On a GPU, CUDA reports such reads."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import pytest
import torch
from runs import quiet
from torch import Tensor

from dipole import Pairs, PairsError, objective
from dipole.core.objectives.registry import registry
from dipole.core.train import update
from tests.device_reads import META, WaitError, no_cuda_waits, no_reads

B, D = 6, 4
Rows = Callable[..., Tensor]
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
TERMS = {
    entry.name: entry.name for entry in registry.entries() if entry.kind != "diagnostic"
} | {
    "cross_entropy": "cross_entropy(classes=3)", "cacr k": "cacr(k=1, intra_batch=true, cost=rbf)",
    "triplet hardest": "triplet(mode=hardest)", "bilinear": "infonce(similarity=bilinear, joint=true) + dp",
    "blocks k": "blocks(b=1, k=2)", "blocks hinge": "blocks(loss=hinge)", "learned": "hcl(temperature=learned) + dp",
    "fixed sigmoid": "siglip(temperature=0.1, bias=-1)",
    "proximal": "infonce(temperature=0.01) + 0.1*cllr(solver=proximal)",
}  # fmt: skip
SCALARS = "align_uniform", "blocks", "dp", "rbf"


def constructors(rows: Rows, labels: Tensor, device: torch.device) -> Iterator[tuple[str, Callable[[], Pairs]]]:
    """Every way to make pairs, with and without what is optional."""

    def numbers(*values: int) -> Tensor:
        return torch.tensor(values, device=device)

    document = numbers(0, 0, 0, 1, 1, 2)
    dropped = torch.full((B, 2), -1, device=device)
    x, y, z, wide = rows(B, D), rows(B, D), rows(B, D), rows(B, 2, D)
    queue, blocks = rows(5, D), rows(B, 3, D)
    yield "views", lambda: Pairs.from_views([x, y], labels)
    yield "three views", lambda: Pairs.from_views([x, y, z], labels)
    yield "cross", lambda: Pairs.cross(x, y, labels=labels)
    yield "queue", lambda: Pairs.cross(x, wide, queue, True, labels, queue_labels=labels[:5])
    yield "queue alone", lambda: Pairs.cross(x, y, queue, batch_negatives=False)
    yield "dropped", lambda: Pairs.cross(x, wide, ignored=dropped, labels=labels)
    yield "window", lambda: Pairs.from_window(x, y, document, 2, labels=labels)
    yield "window zero", lambda: Pairs.from_window(x, y, document, self_logit="zero", labels=labels)
    yield "blocks", lambda: Pairs.from_blocks(blocks, "all", labels=labels, draw=3)
    yield "first of blocks", lambda: Pairs.from_blocks(blocks, labels=labels)
    yield "means of blocks", lambda: Pairs.from_blocks(blocks, candidates="means", labels=labels)
    yield "crops", lambda: Pairs.from_crops([x, y], [z], queue, labels)
    yield "labels", lambda: Pairs.from_labels(x, labels)
    yield "labels of views", lambda: Pairs.from_labels([x, y], labels - 1, None, queue, labels[:5])
    yield "columns", lambda: Pairs.from_columns(x, y, wide, labels)
    yield "own columns", lambda: Pairs.from_columns(x, y, [z, y], ignored=dropped, negatives_of="own")
    yield "sides", lambda: Pairs.both(x, y, labels)
    yield "points", lambda: Pairs.of_points(x)
    yield "views with others", lambda: Pairs.from_views([x, y], labels).without(dropped.repeat(2, 1))


def may_wait(text: str, name: str) -> bool:
    """Lists as long as the candidates: whether a scalar has any negative, a block any other, is asked."""
    return name.startswith(("labels", "own columns")) and any(term in text for term in SCALARS)


def outcomes(text: str, device: torch.device, every: int = 1) -> Iterator[tuple[str, object]]:
    """Return the loss of a term with its gradients for every so-many-th kind of pairs, or its error."""
    generator, leaves = torch.Generator().manual_seed(0), []

    def rows(*shape: int) -> Tensor:
        leaves.append(torch.randn(*shape, dtype=torch.float64, generator=generator).to(device).requires_grad_())
        return leaves[-1]

    labels = torch.tensor([0, 1, 0, 2, 1, 0]).to(device)
    for number, (name, make) in enumerate(constructors(rows, labels, device), list(TERMS.values()).index(text)):
        if number % every:
            continue
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` formats its stack
        yield name, partial(step, objective(text, dim=D).to(device, torch.float64), make, leaves)


def step(built: object, make: Callable[[], Pairs], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    for each in leaves:
        each.grad = None
    loss = built(make()).loss
    if loss.requires_grad:
        loss.backward()
    built.after_step(0.1)
    return loss.detach(), *(each.grad for each in leaves)


# On every layout, or on every seventh one, which are others for the next objective.
LAYOUTS = pytest.mark.parametrize(
    "every", [pytest.param(1, marks=pytest.mark.slow, id="all"), pytest.param(7, id="few")]
)


@LAYOUTS
@pytest.mark.parametrize("text", TERMS.values(), ids=TERMS)
def test_an_objective_reads_nothing_back(text, every):
    faults, done = [], 0
    for name, run in outcomes(text, META, every):
        try:
            with suppress(PairsError), no_reads():  # refused by its shape
                run()
                done += 1
        except Exception as error:
            if not (isinstance(error, WaitError) and may_wait(text, name)):
                faults.append(f"{name}: {error!r:.300}")
    assert not faults, "\n".join(faults)
    assert done


@LAYOUTS
@pytest.mark.parametrize("text", TERMS.values(), ids=TERMS)
def test_without_reading_the_values_are_the_same(text, every, monkeypatch):
    """The branches for an accelerator, run on a CPU, give the same losses and gradients."""

    def values() -> dict[str, tuple[Tensor, ...]]:
        found = {}
        for name, run in outcomes(text, torch.device("cpu"), every):
            with suppress(PairsError):
                found[name] = run()
        return found

    read = values()
    for name in ("checks", "losses.blocks", "indices", "losses.supcon"):
        module = importlib.import_module(f"dipole.core.objectives.{name}")
        monkeypatch.setattr(module, "reads_at_once", lambda x: False)
    torch.testing.assert_close(values(), read, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("wait", [
    *(lambda x: x.sum().item(), lambda x: bool((x > 0).any()), lambda x: x.cpu(), lambda x: x[x > 0]),
    *(lambda x: x.unique(), lambda x: x.repeat_interleave(torch.ones(3, dtype=torch.long, device=META))),
    *(lambda x: torch.as_tensor([1, 2], device=META), lambda x: torch.arange(3).to(META)),
    lambda x: torch.linalg.svdvals(x.expand(3, 3)),
])  # fmt: skip
def test_the_stand_in_sees(wait):
    x = torch.ones(3, device=META)
    with no_reads(), pytest.raises((WaitError, NotImplementedError, RuntimeError)):
        wait(x)


# On a GPU CUDA itself raises where a step would wait.


@pytest.mark.parametrize("text", [pytest.param(text, marks=ON_GPU) for text in TERMS.values()], ids=TERMS)
def test_an_objective_waits_for_nothing(text):
    on_cpu, with_first = (dict(outcomes(text, torch.device(kind))) for kind in ("cpu", "cuda"))
    faults, done = [], 0
    for name, run in outcomes(text, torch.device("cuda")):
        try:
            on_cpu[name]()  # what is refused there ends the process on a GPU
        except PairsError:
            continue
        with_first[name]()  # constants, workspaces and compiled kernels
        try:
            with no_cuda_waits():
                run()
            done += 1
        except RuntimeError as error:
            if not may_wait(text, name):
                faults.append(f"{name}: {error}")
    assert not faults, "\n".join(faults)
    assert done


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_training_step_waits_for_nothing_before_its_check(blobs, tmp_path, monkeypatch):
    steps = 0
    forward = update.ForwardPass.forward

    def counted(self, batch):
        nonlocal steps
        steps += 1
        if steps == 1:
            return forward(self, batch)
        with no_cuda_waits():
            return forward(self, batch)

    monkeypatch.setattr(update.ForwardPass, "forward", counted)
    overrides = ("device=cuda", "train.log_every=10", "train.steps=12")
    assert quiet(blobs, *overrides, runs=tmp_path).status == "done"
    assert steps == 12
