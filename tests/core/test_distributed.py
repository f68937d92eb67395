"""Two ranks with half the batch each have the loss and the gradient of one process, in float64, for every objective."""

import os
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import dipole
from dipole import Pairs
from dipole.core.contrast.registry import registry

SPECS = [
    entry.name if entry.kind == "objective" else f"infonce + {entry.name}"
    for entry in registry.entries()
    if entry.kind != "diagnostic"
] + ["cacr(cost=rbf)", "blocks(loss=hinge)", "dcl(similarity=dot)", "infonce(similarity=bilinear)"]
WIDTH, OUT = 6, 5


def batch():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 10, WIDTH, dtype=torch.double, generator=generator)  # three views of 10 instances
    weight = torch.randn(OUT, WIDTH, dtype=torch.double, generator=generator)
    return x, weight, torch.arange(10) % 3


def build(spec):
    torch.manual_seed(3)
    objective = dipole.objective(spec, dim=OUT).double()
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.double))
    return objective


def layouts(views, labels):
    yield Pairs.from_views(views, labels)
    yield Pairs.cross(views[0], views[1], torch.ones(4, OUT, dtype=torch.double).tril(), labels=labels)
    yield Pairs.cross(views[0], torch.stack([views[1], views[2]], 1), intra_batch=True)


def runs(spec, x, weight, labels):
    """Loss and gradient of an encoder's weight for each layout that can carry the objective."""
    for number in range(3):
        if (spec, number) in {("tuple", 1), ("tuple", 2), ("cross_entropy", 2)}:  # they need labels of their candidates
            continue
        weight = weight.detach().clone().requires_grad_()
        pairs = list(layouts([view @ weight.T for view in x], labels))[number]
        loss = build(spec)(pairs).loss
        loss.backward()
        yield loss.detach(), weight.grad


def rank_main(rank, file, sizes, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    x, weight, labels = batch()
    start = sum(sizes[:rank])
    mine = slice(start, start + sizes[rank])
    found = {}
    for spec in SPECS:
        rows = []
        for loss, grad in runs(spec, x[:, mine], weight, labels[mine]):
            dist.all_reduce(grad)
            rows.append((loss, grad / 2))  # what DistributedDataParallel does
        found[spec] = rows
    if rank == 1:
        torch.save(found, results)
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[(5, 5), (7, 3)], ids=["equal", "unequal"])
def two_ranks(request):
    with tempfile.TemporaryDirectory() as folder:
        results = os.path.join(folder, "results.pt")
        mp.spawn(rank_main, args=(os.path.join(folder, "meet"), request.param, results), nprocs=2)
        yield torch.load(results)


@pytest.mark.parametrize("spec", SPECS)
def test_two_ranks_equal_one_process(spec, two_ranks):
    single = list(runs(spec, *batch()))
    assert len(single) == len(two_ranks[spec]) > 0
    for (loss, grad), (loss_2, grad_2) in zip(single, two_ranks[spec], strict=True):
        torch.testing.assert_close(loss_2, loss, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(grad_2, grad, rtol=1e-9, atol=1e-11)


def test_a_gather_without_gradient_would_be_noticed():
    """Negative control: candidates that carry no gradient give another gradient."""
    x, weight, _ = batch()
    weight.requires_grad_()
    a, b = x[0] @ weight.T, x[1] @ weight.T
    right = torch.autograd.grad(dipole.objective("infonce")(Pairs.cross(a, b)).loss, weight)[0]
    a, b = x[0] @ weight.T, x[1] @ weight.T
    wrong = torch.autograd.grad(dipole.objective("infonce")(Pairs.cross(a, b.detach())).loss, weight)[0]
    assert (right - wrong).norm() > 0.1 * right.norm()
