"""Matrices formed as a whole: differentiable twice, at ease under autocast and compilation, and let go afterwards."""

import os
import subprocess
import sys

import pytest
import torch
from loops import draw

import dipole
from dipole.core.objectives import similarity, tiles
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.registry import registry
from dipole.core.utils.errors import DipoleError, EngineError
from dipole.core.utils.uncompiled import uncompiled

SPECS = [entry.name for entry in registry.entries() if entry.kind != "diagnostic"] + [
    "infonce(temperature=0.01)",
    "infonce(similarity=bilinear)",
    "cacr(positive_weights=uniform, negative_weights=uniform)",
    "cacr(cost=rbf)",
    "triplet(mode=hardest)",
    "infonce + 0.1*dp + 0.01*cllr",
]


def layouts(z):
    """Pairs of every constructor from six rows of each of three matrices."""
    f, g, h = z
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    yield "views", Pairs.from_views([f, g, h], labels)
    yield "cross", Pairs.cross(f, g, queue=h.detach(), intra_batch=True, labels=labels, queue_labels=labels)
    yield "queue alone", Pairs.cross(f, g, queue=h.detach(), batch_negatives=False)
    dropped = torch.tensor([[1, -1], [-1, -1], [3, 2], [2, 2], [0, -1], [-1, 4]])
    yield "dropped", Pairs.cross(f, g, ignored=dropped)
    yield "window", Pairs.from_window(f, g, torch.tensor([0, 0, 0, 0, 1, 1]), self_logit="zero")
    yield "blocks", Pairs.from_blocks(torch.stack([f, g, h], 1), anchors="all", labels=labels)
    yield "crops", Pairs.from_crops([f, g], [h])


# Leaves that depend on each other, as a siamese predictor or a concatenation makes them.
DEPENDENT = {
    "function": lambda f, g, h: [f, f.flip(0).tanh(), f * h],
    "one tensor": lambda f, g, h: list(torch.cat([f, g, h]).sin().split(len(f))),
    "same": lambda f, g, h: [f, f, f],
}


@pytest.mark.parametrize("way", DEPENDENT)
@pytest.mark.parametrize("name", [name for name, _ in layouts([draw(6, 4, seed=n) for n in range(3)])])
def test_a_gradient_with_its_graph_equals_the_plain_gradient(name, way):
    """A wrong second backward pass shows as another first gradient if rows depend on each other."""
    seen = 0
    for spec in SPECS:
        torch.manual_seed(0)
        loss = dipole.objective(spec, dim=4).double()
        leaves = [draw(6, 4, seed=n) for n in range(3)]
        given, found = [*leaves, *loss.parameters()], []
        for create_graph in (False, True):
            try:
                value = loss(dict(layouts(DEPENDENT[way](*leaves)))[name]).loss
            except DipoleError:
                break
            more = {"create_graph": create_graph, "allow_unused": True, "materialize_grads": True}
            found.append(torch.autograd.grad(value, given, **more))
        if found:
            seen += 1
            torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12, msg=lambda text: f"{spec}: {text}")  # noqa: B023
    assert seen > 8


# SwAV's codes are targets, taken as constants: its gradient is no derivative of one function.
@pytest.mark.parametrize(
    "spec", [*[spec for spec in SPECS if spec != "swav"], "infonce(temperature=learned)", "siglip"]
)
def test_a_second_derivative_is_that_of_the_gradient(spec):
    """Finite differences of the gradient; a penalty on it, or a Hessian, is otherwise silently wrong."""
    z = [draw(6, 4, seed=n) for n in range(3)]
    name = "blocks" if spec in ("tuple", "blocks") else "views"
    torch.manual_seed(0)
    loss = dipole.objective(spec, dim=4).double()
    with torch.no_grad():
        for parameter in loss.parameters():  # CLLR's L and bilinear's W start as the identity
            parameter += 0.1 * torch.randn_like(parameter)
    given = [*z, *loss.parameters()]

    def gradient():
        value = loss(dict(layouts(z))[name]).loss
        found = torch.autograd.grad(value, given, create_graph=True, materialize_grads=True)
        return torch.cat([each.flatten() for each in found])

    direction = [draw(*each.shape, seed=10 + n).detach() for n, each in enumerate(given)]
    probe = draw(sum(each.numel() for each in given), seed=20).detach()
    found = torch.autograd.grad((gradient() * probe).sum(), given, materialize_grads=True)
    along = sum(float((slope * way).sum()) for slope, way in zip(found, direction, strict=True))
    step, sides = 1e-6, []
    for sign in (1, -2):
        with torch.no_grad():
            for each, way in zip(given, direction, strict=True):
                each += sign * step * way
        sides.append(gradient().detach())
    measured = float(((sides[0] - sides[1]) * probe).sum()) / (2 * step)
    assert along == pytest.approx(measured, rel=1e-5, abs=1e-7)
    assert abs(measured) > 1e-4


def test_tiles_refuse_second_derivatives_and_name_the_way_out(monkeypatch):
    z = [draw(6, 4, seed=n) for n in range(2)]
    dense_loss = dipole.objective("infonce")(*z).loss
    monkeypatch.setattr(similarity, "LARGEST", 0)
    loss = dipole.objective("infonce")(*z).loss
    torch.testing.assert_close(torch.autograd.grad(loss, z, retain_graph=True), torch.autograd.grad(dense_loss, z))
    with pytest.raises(EngineError, match=r"no second derivatives .*DIPOLE_ENGINE=dense"):
        torch.autograd.grad(loss, z, create_graph=True)
    monkeypatch.setenv("DIPOLE_ENGINE", "dense")
    torch.autograd.grad(dipole.objective("infonce")(*z).loss, z, create_graph=True)


@pytest.mark.parametrize("spec", SPECS)
def test_autocast_around_the_loss_changes_nothing(spec):
    z = [draw(6, 4, seed=n).detach().float().requires_grad_() for n in range(3)]
    name = "blocks" if spec in ("tuple", "blocks") else "views"

    def measured(cast):
        torch.manual_seed(0)
        loss = dipole.objective(spec, dim=4)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            value = loss(dict(layouts(z))[name]).loss
        return value, torch.autograd.grad(value, z, materialize_grads=True)

    torch.testing.assert_close(measured(True), measured(False), rtol=0, atol=0)


@pytest.mark.parametrize("spec", ["infonce + 0.1*dp", pytest.param("triplet(mode=hardest)", marks=pytest.mark.slow)])
def test_a_loss_inside_what_is_compiled(spec):
    loss, (x, y) = dipole.objective(spec), (draw(6, 4, seed=n) for n in range(2))

    def step(x, y):
        return loss(2 * x, y).loss * 3

    torch._dynamo.reset()
    found, wanted = torch.compile(step, backend="eager")(x, y), step(x, y)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found, x), torch.autograd.grad(wanted, x))


# Growth in MB: of ten kept losses on whole matrices, of ten by tiles, and of 8,192 rows, whose matrix would be 256.
KEEP = """
import torch, dipole
from dipole.core.utils.machine import peak_memory
torch.set_num_threads(1)
for rows, steps in ((500, 13), (1024, 13), (4096, 1)):
    loss, kept = dipole.objective("infonce + 0.1*dp"), []
    z = [torch.randn(rows, 32, requires_grad=True) for _ in range(2)]
    before = peak_memory()
    for step in range(steps):
        outcome = loss(*z)
        outcome.loss.backward()
        kept.append(outcome.loss)
        if step == 2:
            before = peak_memory()
    print((peak_memory() - before) / 2**20)
"""


def test_memory_grows_with_rows_and_a_kept_loss_keeps_no_matrix():
    # Freed matrices go back to the system, so that what is measured is what is held.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", KEEP], capture_output=True, text=True, check=True, env=env)
    whole, tiled, large = map(float, done.stdout.split())
    # Ten matrices, with their exponentials, are 80 MB for 1,000 rows and 160 MB for 2,048, by halves.
    assert max(whole, tiled) < 50
    assert large < 100


def test_exponentials_too_small_for_normal_numbers_are_zero():
    for dtype, low in ((torch.float32, -87.0), (torch.float64, -708.0)):
        x = torch.tensor([0.0, -1.0, low + 1, low - 1, -1e30, -torch.inf, torch.nan], dtype=dtype)
        found = tiles.exp_below(x.clone())
        torch.testing.assert_close(found[:3], x[:3].exp())
        assert found[3:6].tolist() == [0.0, 0.0, 0.0]
        assert found[6].isnan()


def test_a_row_of_zeros_has_no_gradient_and_spoils_no_other():
    """Rows are normalised inside the matrix; a cosine with nothing is 0."""
    x, y = draw(5, 4), draw(5, 4, seed=1)
    with torch.no_grad():
        x[2] = 0
    loss = dipole.objective("infonce")(x, y).loss
    loss.backward()
    assert not x.grad[2].any()
    unit = torch.nn.functional.normalize(torch.cat([x, y]).detach(), dim=1)
    logits = (unit @ unit.T / 0.5).masked_fill(torch.eye(10, dtype=torch.bool), -torch.inf)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, torch.arange(10).roll(5)))
    assert bool(y.grad.isfinite().all())


def test_a_run_starts_without_the_compiler_and_scikit_learn():
    code = (
        "import sys\nfrom dipole.core.train.recipe import load\nload('digits-simclr')\n"
        "import dipole.core.objectives.tiles, dipole.vision.probes, dipole.core.utils.sync_batch_norm\n"
        "import dipole.core.train.run, dipole.text.adapter\n"
        "assert 'torch' in sys.modules\n"
        "assert not {'torch._dynamo', 'sklearn', 'pandas', 'matplotlib', 'altair'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_it_is_run_as_written_inside_of_what_is_compiled():
    seen, traced = [], []

    def inner(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1

    @uncompiled
    def outer(x):
        seen.append(torch.compiler.is_compiling())
        return inner(x) * 2

    def backend(graph, _):
        traced.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    assert (outer(torch.ones(2)).tolist(), outer.__name__) == ([4, 4], "outer")
    torch._dynamo.reset()
    step = torch.compile(lambda x: outer(x.sin()).cos(), backend=backend)
    for size in (2, 3, 4):
        x = torch.linspace(0, 1, size)
        assert torch.equal(step(x), ((x.sin() + 1) * 2).cos())
    assert seen == [False] * 2 * 4
    assert not [name for name in traced if "add" in name or "mul" in name]
