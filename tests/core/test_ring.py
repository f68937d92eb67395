"""Candidates that travel round a ring give the loss and every gradient of one process, and nothing is gathered."""

import os
import subprocess
import sys
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import dipole
from dipole import Pairs
from dipole.core.objectives.embedded import Embedded
from dipole.core.objectives.travelling import Travelling
from dipole.core.utils.errors import PairsError
from tests.core.test_distributed import LAYOUTS, SPECS, batch, build
from tests.kernel_processes import INTERPRETED, needs_triton
from tests.ranks import leaving_together, start_ranks

OWN = "indices of one's own"
MORE = {
    OWN: lambda r: Pairs(
        r["a"], r["b"], r["own"], r["own"][:, :0], r["labels"], index=r["index"], candidate_index=r["index"]
    ),
    "own square": lambda r: Pairs(r["a"], r["a"], r["own"][:, :0], r["own"]),
    "points": lambda r: Pairs.of_points(r["a"]),
    "ties": lambda r: Pairs.from_views([z - z.detach() + torch.eye(2, 5)[r["labels"] % 2] for z in (r["a"], r["b"])]),
}
THOROUGH = ("infonce + 0.1*dp", "dcl(similarity=dot)")
CASES = [(spec, name) for spec in THOROUGH for name in LAYOUTS if name != "duplicates"]
CASES += [(spec, name) for spec in SPECS for name in ("views", "queue and queries")]
CASES += [(spec, "window") for spec in ("infonce", "tuple", "triplet", "cross_entropy", "sample_memory", "blocks")]
CASES += [("infonce(similarity=bilinear)", name) for name in (OWN, "several keys", "three views", "crops")]
CASES += [("triplet(mode=hardest)", name) for name in ("views", "queue", "crops", "ties")]
CASES += [("infonce", name) for name in (OWN, "own square")] + [("align_uniform(align_weight=0)", "points")]
CASES += [("sample_memory", OWN), ("infonce(temperature=0.01)", "views"), ("hcl(temperature=0.01)", "queue")]
CASES = list(dict.fromkeys(CASES))
LOOKS = ("co2", "swav", "blocks", "vicreg", "vicreg_of_candidates", "vicreg_of_all", "barlow_twins")
"""Terms that look at the rows of all candidates."""
SIZES = {"two": (7, 3), "three": (4, 5, 1), "four": (3, 2, 4, 1)}


def value(spec, name, x, weight, rows, ring):
    """Loss and gradients, or what is said instead."""
    weight = weight.detach().clone().requires_grad_()
    z = dict(zip("abc", [view @ weight.T for view in x], strict=True))
    objective = build(spec)
    objective.ring = ring
    try:
        if name in MORE:  # rows of this rank, indices into them
            given = MORE[name](z | rows | {"own": torch.arange(len(x[0])).unsqueeze(1)})
        else:
            given = Embedded(z | rows, LAYOUTS[name])
        outcome = objective(given)
    except PairsError as error:
        return str(error).split(",")[0]
    wanted = [weight, *objective.parameters()]
    grads = torch.autograd.grad(outcome.loss, wanted, allow_unused=True)
    return outcome.loss.detach(), [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, grads, strict=True)]


@leaving_together
def rank_main(rank, file, sizes, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=len(sizes))
    asked = []
    gather = Travelling.everywhere
    Travelling.everywhere = lambda self: (asked.append(self.shape), gather(self))[1]
    x, weight, rows = batch()
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    found, gathered = {}, set()
    for spec, name in CASES[:: 2 if len(sizes) == 4 else 1]:
        got = value(spec, name, x[:, mine], weight, {key: values[mine] for key, values in rows.items()}, True)
        if not isinstance(got, str):
            for grad in got[1]:
                dist.all_reduce(grad)
            got = got[0], [grad / len(sizes) for grad in got[1]]  # what DistributedDataParallel does
        found[spec, name] = got
        if asked:
            gathered.add((spec, name))
            asked.clear()
    if rank == 1:
        torch.save((found, gathered), results)


@pytest.fixture(
    scope="module",
    params=[pytest.param(SIZES[name], marks=[pytest.mark.slow] * (name != "four")) for name in SIZES],
    ids=list(SIZES),
)
def ranks(request):
    with tempfile.TemporaryDirectory() as folder:
        results = os.path.join(folder, "results.pt")
        start_ranks(rank_main, (os.path.join(folder, "meet"), request.param, results), len(request.param))
        yield torch.load(results)


@pytest.fixture(scope="module")
def single():
    return {(spec, name): value(spec, name, *batch(), False) for spec, name in CASES}


def test_a_ring_equals_one_process(ranks, single):
    found, _ = ranks
    carried = 0
    for case, got in found.items():
        expected = single[case]
        if isinstance(expected, str) or isinstance(got, str):
            assert got == expected, case
            continue
        carried += 1
        torch.testing.assert_close(got[0], expected[0], rtol=1e-12, atol=1e-12, msg=lambda m, c=case: f"{c}: {m}")
        for grad, true in zip(got[1], expected[1], strict=True):
            scale = float(true.abs().max()) + 1
            torch.testing.assert_close(grad, true, rtol=0, atol=1e-12 * scale, msg=lambda m, c=case: f"{c}: {m}")
    assert carried > 0.9 * len(found)


def test_nothing_is_gathered_but_for_those_who_look(ranks):
    _, gathered = ranks
    for spec, name in gathered:
        assert name == "block means" or spec in LOOKS, (spec, name)


# Kernels ---------------------------------------------------------------------------------------------------------

BY_KERNELS = {
    "infonce + dp": lambda a, b, queue: Pairs.from_views([a, b]),
    "hcl(temperature=0.01)": lambda a, b, queue: Pairs.cross(a, b, queue),
    "triplet(mode=hardest)": lambda a, b, queue: Pairs.cross(a, b),
    "dcl(similarity=dot)": lambda a, b, queue: Pairs.cross(a, b, queue, batch_negatives=False),
}


def in_ring(spec, views, weight, queue, dtype):
    """Loss and gradient of a weight that makes the embeddings."""
    weight = weight.to(dtype).detach().requires_grad_()
    a, b = (view.to(dtype) @ weight.T for view in views)
    loss = dipole.objective(spec, ring=True)(BY_KERNELS[spec](a, b, queue.to(dtype))).loss
    return loss.detach(), torch.autograd.grad(loss, weight)[0]


@leaving_together
def kernels_main(rank, file, sizes, results):
    from dipole.core.objectives import engine

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=len(sizes))
    x, weight, _ = batch()
    mine, queue = slice(sum(sizes[:rank]), sum(sizes[: rank + 1])), x[2, :, : len(weight)]
    found = {}
    for spec in BY_KERNELS:
        before = engine.served()
        loss, grad = in_ring(spec, x[:2, mine], weight, queue, torch.float32)
        dist.all_reduce(grad)
        found[spec] = loss, grad / len(sizes), engine.served() - before, engine.failures()
    if rank == len(sizes) - 1:
        torch.save(found, results)


@needs_triton
@pytest.mark.parametrize("sizes", [SIZES["two"], pytest.param(SIZES["four"], marks=pytest.mark.slow)], ids=len)
def test_kernels_serve_what_comes_by(sizes, tmp_path, monkeypatch):
    """Interpreted: their sums are joined over the chunks, in float32 as close to one process as they are elsewhere."""
    for name, value in INTERPRETED.items():
        monkeypatch.setenv(name, value)
    mp.spawn(kernels_main, (tmp_path / "meet", sizes, tmp_path / "found"), len(sizes))  # of this environment
    monkeypatch.delenv("DIPOLE_ENGINE")
    x, weight, _ = batch()
    for spec, (loss, grad, served, failures) in torch.load(tmp_path / "found").items():
        assert not failures
        # There and back; of two views a rank's own rows, and a block that comes by and serves two ranks.
        assert served >= (4 if spec == "infonce + dp" else 2), spec
        true, slope = in_ring(spec, x[:2], weight, x[2, :, : len(weight)], torch.float64)
        torch.testing.assert_close(loss.double(), true, rtol=2e-4, atol=2e-5, msg=lambda m, s=spec: f"{s}: {m}")
        scale = 1 + float(slope.abs().max())
        torch.testing.assert_close(grad.double(), slope, rtol=0, atol=2e-4 * scale, msg=lambda m, s=spec: f"{s}: {m}")


# What goes wrong -------------------------------------------------------------------------------------------------


@leaving_together
def wrong_main(rank, file, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    a, b = torch.randn(2, 4, 3, dtype=torch.double, requires_grad=True)
    objective = dipole.objective("infonce", ring=True)
    errors = {}
    related = objective.relate(Pairs.from_views([a, b]))
    if rank == 0:
        from dipole.core.utils.distributed import alone

        with alone(), pytest.raises(PairsError) as error:
            related.local_pairs[0].candidates.sum()
        errors["alone"] = str(error.value)
    objective.ring = rank == 0
    with pytest.raises(PairsError) as error:
        objective(a, b)
    errors["one in a ring"] = str(error.value)
    torch.save(errors, f"{results}{rank}")


def test_what_cannot_work_is_an_error_on_every_rank(tmp_path):
    start_ranks(wrong_main, (tmp_path / "meet", tmp_path / "errors"), 2)
    first, second = torch.load(tmp_path / "errors0"), torch.load(tmp_path / "errors1")
    assert "one rank alone" in first["alone"]
    assert "none of them in a ring" in first["one in a ring"]
    assert "none of them in a ring" in second["one in a ring"]


# Waiting ---------------------------------------------------------------------------------------------------------

ON_META = """
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import dipole
from dipole import Pairs
from dipole.core.objectives import gather

dist.init_process_group("cpu:fake,meta:fake", store=FakeStore(), rank=0, world_size=4)
gather.all_numbers = lambda numbers: [list(numbers)] * 4  # the group without a network leaves them unwritten
for spec in ("infonce + dp", "dcl(similarity=dot)", "hcl", "cacr(intra_batch=true)", "triplet(mode=hardest)"):
    for layout in (
        lambda a, b, queue: Pairs.from_views([a, b]),
        lambda a, b, queue: Pairs.cross(a, b, queue),
        lambda a, b, queue: Pairs.cross(a, b, queue, batch_negatives=False),
    ):
        a, b = (torch.randn(5, 3, device="meta", requires_grad=True) for _ in range(2))
        queue = torch.randn(6, 3, device="meta")
        dipole.objective(spec, ring=True)(layout(a, b, queue)).loss.backward()
        assert a.grad.shape == b.grad.shape == (5, 3)
print("nothing was read")
"""


def test_a_step_in_a_ring_reads_nothing_from_the_device():
    """Tensors without contents: whatever asks for a value raises."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", ON_META], capture_output=True, text=True)
    assert "nothing was read" in done.stdout, done.stderr[-2000:]
