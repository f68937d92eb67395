"""Matrices as a whole and by tiles against float64: statistics, two passes, second derivatives, memory."""

import math
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from loops import draw

import dipole
from dipole import DipoleError, EngineError, Pairs
from dipole.core.objectives import engine, similarity, tiles
from dipole.core.objectives.engine import row_statistics
from dipole.core.objectives.registry import registry
from dipole.core.objectives.similarity import Factors
from dipole.core.objectives.statistics import Between, Count, Extreme, LogSumExp, SoftmaxMean, Softplus, Statistic, Sum

SPECS = [
    *(entry.name for entry in registry.entries() if entry.kind != "diagnostic"),
    *("infonce(temperature=0.01)", "infonce(similarity=bilinear)", "cacr(cost=rbf)", "triplet(mode=hardest)"),
    *("cacr(positive_weights=uniform, negative_weights=uniform)", "infonce + 0.1*dp + 0.01*cllr"),
]
# Leaves that depend on each other, as a siamese predictor or a concatenation makes them.
DEPENDENT = {
    "function": lambda f, g, h: [f, f.flip(0).tanh(), f * h],
    "one tensor": lambda f, g, h: list(torch.cat([f, g, h]).sin().split(len(f))), "same": lambda f, g, h: [f, f, f],
}  # fmt: skip
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


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("way", DEPENDENT)
@pytest.mark.parametrize("name", [name for name, _ in layouts([draw(6, 4, seed=n) for n in range(3)])])
def test_a_gradient_with_its_graph_equals_the_plain_gradient(name, way, every):
    """A wrong second backward pass shows as another first gradient if rows depend on each other."""
    seen = 0
    for spec in SPECS[list(DEPENDENT).index(way) % every :: every]:
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
    assert seen > 8 // every


# SwAV's codes are targets, taken as constants: its gradient is no derivative of one function.
@pytest.mark.parametrize("spec", [*[spec for spec in SPECS if spec != "swav"], "infonce(temperature=learned)"])
def test_a_second_derivative_is_that_of_the_gradient(spec):
    """Finite differences of the gradient. A penalty on it, or a Hessian, is otherwise silently wrong."""
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
    found = torch.autograd.grad(gradient() @ probe, given, materialize_grads=True)
    along = sum(float((slope * way).sum()) for slope, way in zip(found, direction, strict=True))
    step, sides = 1e-6, []
    for sign in (1, -2):
        with torch.no_grad():
            torch._foreach_add_(given, direction, alpha=sign * step)
        sides.append(gradient().detach() @ probe)
    measured = float(sides[0] - sides[1]) / (2 * step)
    assert along == pytest.approx(measured, rel=1e-5, abs=1e-7)
    assert abs(measured) > 1e-4


def test_tiles_refuse_second_derivatives_and_name_the_way_out(monkeypatch):
    z, objective = [draw(6, 4, seed=n) for n in range(2)], dipole.objective("infonce")
    dense_loss = objective(*z).loss
    monkeypatch.setattr(similarity, "LARGEST", 0)
    loss = objective(*z).loss
    torch.testing.assert_close(torch.autograd.grad(loss, z, retain_graph=True), torch.autograd.grad(dense_loss, z))
    with pytest.raises(EngineError, match=r"no second derivatives .*DIPOLE_ENGINE=dense"):
        torch.autograd.grad(loss, z, create_graph=True)
    monkeypatch.setenv("DIPOLE_ENGINE", "dense")
    torch.autograd.grad(objective(*z).loss, z, create_graph=True)


@pytest.mark.parametrize("spec", SPECS)
def test_autocast_around_the_loss_changes_nothing(spec):
    z = [draw(6, 4, seed=n).detach().float().requires_grad_() for n in range(3)]
    name = "blocks" if spec in ("tuple", "blocks") else "views"

    measured = []
    for cast in (True, False):
        torch.manual_seed(0)
        loss = dipole.objective(spec, dim=4)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            value = loss(dict(layouts(z))[name]).loss
        measured.append((value, torch.autograd.grad(value, z, materialize_grads=True)))
    torch.testing.assert_close(*measured, rtol=0, atol=0)


@pytest.mark.parametrize("spec", ["infonce + 0.1*dp", "triplet(mode=hardest)"])
def test_a_loss_inside_what_is_compiled(spec):
    loss, (x, y) = dipole.objective(spec), draw(2, 6, 4)

    def step(x, y):
        return loss(2 * x, y).loss * 3

    graphs = []
    torch._dynamo.reset()
    found = torch.compile(step, backend=lambda graph, _: graphs.append(graph) or graph.forward)(x, y)
    wanted = step(x, y)
    assert len(graphs) == 2  # what stands before the loss, and after it
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found, x), torch.autograd.grad(wanted, x))


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
    """Rows are normalised inside the matrix. A cosine with nothing is 0."""
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
        "import sys\nfrom dipole.core.train.recipe import load_recipe\nload_recipe('digits-simclr')\n"
        "import dipole.core.objectives.tiles, dipole.vision.probes, dipole.core.utils.sync_batch_norm\n"
        "import dipole.core.train.run, dipole.text.adapter\n"
        "assert 'torch' in sys.modules\n"
        "assert not {'torch._dynamo', 'sklearn', 'pandas', 'matplotlib', 'altair'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def unit(n, d, seed):
    x = torch.randn(n, d, dtype=torch.double, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(x, dim=1)


@pytest.fixture(params=["symmetric", "rectangular", "own exclusions", "first", "first of its own", "last of its own"])
def layout(request):
    """Anchors, candidates, excluded columns, whether both are one matrix, and the first column that takes part."""
    kind = request.param
    if kind in ("symmetric", "rectangular"):
        views = Pairs.from_views([unit(9, 5, 0), unit(9, 5, 1)])
        pairs = views if kind == "symmetric" else Pairs.cross(unit(7, 5, 0), unit(7, 5, 1), unit(12, 5, 2))
        return pairs.anchors, pairs.candidates, pairs.excluded, kind == "symmetric", 0
    x, y = unit(10, 5, 3), unit(13, 5, 4) if kind == "first" else None
    y = x if y is None else y
    excluded = torch.tensor([[i, (3 * i + 1) % len(y), -1] for i in range(10)])
    if kind == "last of its own":
        excluded[9] = -1  # a row keeps its only negative, itself. All others have none
    return x, y, excluded, False, {"own exclusions": 0, "first": 5, "first of its own": 6, "last of its own": 9}[kind]


def statistics_of(layout, x, y, wanted):
    _, _, excluded, symmetric, first = layout
    counts = torch.tensor([len(columns) for columns in allowed(layout)])
    return row_statistics(Factors(x, y, 1.0), excluded, wanted, counts, symmetric, first).values()


def allowed(layout):
    """The columns of each row that take part."""
    _, y, excluded, _, first = layout
    return [[j for j in range(first, len(y)) if j not in banned] for banned in excluded.tolist()]


def test_extremes_and_counts(layout, monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 4)
    x, y, *_ = layout
    wanted = [Extreme(), Extreme(largest=False), Count(-0.2, 0.4), LogSumExp(3.0)]
    most, least, count, _ = statistics_of(layout, x, y, wanted)
    s = x @ y.T
    for i, columns in enumerate(allowed(layout)):
        assert most[i] == max(columns, key=lambda j: s[i, j], default=-1)
        assert least[i] == min(columns, key=lambda j: s[i, j], default=-1)
        assert count[i] == sum(-0.2 < s[i, j] < 0.4 for j in columns)


def test_unbounded_similarities_use_a_running_maximum(monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 16)
    x = 30 * torch.randn(40, 6, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    own, counts = torch.arange(40).unsqueeze(1), torch.full((40,), 39)
    found = row_statistics(Factors(x, x), own, [LogSumExp(1.0)], counts, True)[LogSumExp(1.0)]
    s = (x @ x.T).fill_diagonal_(-math.inf)
    torch.testing.assert_close(found, s.logsumexp(1), rtol=1e-12, atol=0)
    assert s.max() > 1000


def check_rows_without_negatives(x):
    """Also for the kernels, with rows x (4, D)."""
    x.requires_grad_()
    everything, none = torch.arange(4).repeat(4, 1), torch.zeros(4, dtype=torch.long)
    wanted = [LogSumExp(2.0), LogSumExp(200.0), SoftmaxMean(2.0), Sum(), Extreme()]
    found = row_statistics(Factors(x, x, 1.0), everything, wanted, none, True)
    assert [found[each].tolist() for each in wanted] == [[empty] * 4 for empty in (-math.inf, -math.inf, 0, 0, -1)]
    (found[wanted[2]].sum() + found[wanted[3]].sum()).backward()
    assert (x.grad == 0).all()
    # No candidate is a negative of any anchor, and no column is left.
    gone = row_statistics(Factors(x, x, 1.0), everything[:, :0], [Sum(), Extreme()], none, first=4)
    assert [gone[each].tolist() for each in (Sum(), Extreme())] == [[0] * 4, [-1] * 4]


def test_rows_without_negatives_are_empty_and_without_gradient():
    check_rows_without_negatives(unit(4, 3, 0))


@dataclass(frozen=True)
class Cauchy(Statistic):  # log sum_j 1 / (1 + d2_ij) of unit vectors (t-SimCNE)
    def parts(self, s, e):
        return 1 / (3 - 2 * s)

    def finish(self, sums, shift, count):
        return torch.where(count > 0, torch.where(count > 0, sums[0], 1.0).log(), -math.inf)


@dataclass(frozen=True)
class Plain(Statistic):  # sum_j of a function of s, which need not vanish anywhere
    function: object

    def parts(self, s, e):
        return self.function(s)


@dataclass(frozen=True)
class SoftmaxSquare(Statistic):  # sum_j softmax_j(scale s_ij) s_ij^2
    scale: float

    def parts(self, s, e):
        return e, s.square() * e

    def finish(self, sums, shift, count):
        return torch.where(count > 0, sums[1] / torch.where(count > 0, sums[0], 1.0), 0.0)


def softmax_mean(scale, power=1):
    return lambda row: (torch.softmax(scale * row, 0) * row**power).sum()


# Not defined at s = 1, where each anchor meets itself, nor a number above it.
POLE = Plain(lambda s: (1 - s).log() / (1 - s))
# Each statistic of one row's negatives, written from its definition.
STATISTICS = {
    LogSumExp(2.0): lambda row: torch.logsumexp(2 * row, 0),
    LogSumExp(100.0): lambda row: torch.logsumexp(100 * row, 0),
    **{SoftmaxMean(scale): softmax_mean(scale) for scale in (4.0, -4.0, 120.0, -120.0)}, Sum(): torch.sum,
    Between(0.0, 0.8): lambda row: ((0.8 - row) * (row - 0.0)).clamp_min(0).sum(),
    Between(-0.3, 0.1): lambda row: ((0.1 - row) * (row + 0.3)).clamp_min(0).sum(),
    Softplus(10.0, -3.0): lambda row: (1 + (10 * row - 3).exp()).log().sum(),
    Cauchy(): lambda row: (1 / (3 - 2 * row)).sum().log(), Plain(torch.cos): lambda row: row.cos().sum(),
    Plain(torch.tanh): lambda row: row.tanh().sum(), POLE: lambda row: ((1 - row).log() / (1 - row)).sum(),
    SoftmaxSquare(3.0): softmax_mean(3.0, 2), SoftmaxSquare(-150.0): softmax_mean(-150.0, 2),
}  # fmt: skip


@pytest.mark.parametrize(("tile", "cached"), [(3, True), (4, False), (64, True)])
def test_statistics_and_gradients_equal_loops(layout, tile, cached, monkeypatch):
    monkeypatch.setattr(tiles, "TILE", tile)
    monkeypatch.setattr(tiles, "CACHE_BYTES", 1 << 20 if cached else 0)
    x = layout[0].clone().requires_grad_()
    y = x if layout[1] is layout[0] else layout[1].clone().requires_grad_()
    inputs = [x] if y is x else [x, y]
    rows = [(i, columns) for i, columns in enumerate(allowed(layout)) if columns]
    # Where unit vectors meet themselves, the pole is theirs alone.
    alone = y is x and all(i not in columns for i, columns in rows)
    wanted = [statistic for statistic in STATISTICS if alone or statistic != POLE]
    found = statistics_of(layout, x, y, wanted)
    upstream = torch.randn(len(wanted), len(rows), dtype=torch.double, generator=torch.Generator().manual_seed(7))
    for statistic, values, weights in zip(wanted, found, upstream, strict=True):
        value = values[[i for i, _ in rows]]
        expected = torch.stack([STATISTICS[statistic]((x @ y.T)[i, columns]) for i, columns in rows])
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
        slopes = [torch.autograd.grad(each, inputs, weights, retain_graph=True) for each in (value, expected)]
        torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-9)


def test_unknown_engines_are_refused(monkeypatch):
    for name in ("eager", "tiles", "EAGER"):
        monkeypatch.setenv("DIPOLE_ENGINE", name)
        assert engine.requested() == "eager"
    monkeypatch.setenv("DIPOLE_ENGINE", "tritn")
    with pytest.raises(engine.EngineError, match="'tritn' names no engine; there are dense, eager, triton"):
        engine.requested()
    monkeypatch.delenv("DIPOLE_ENGINE")
    with pytest.raises(engine.EngineError, match="'tritn' names no engine"), engine.using("tritn"):
        raise AssertionError("nothing runs under an engine that there is not")
    assert engine.requested() is None
    with engine.using("eager"):
        assert engine.requested() == "eager"
    assert engine.requested() is None
    for device in ("cpu", "meta"):
        assert ("processor" in engine.reason_against(torch.device(device))) == (device == "cpu")
    # Without a GPU, asking for kernels is an error.
    monkeypatch.setenv("DIPOLE_ENGINE", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x, own = unit(4, 3, 0), torch.arange(4).unsqueeze(1)
    if not torch.cuda.is_available():
        with pytest.raises(engine.EngineError, match=r"no GPU.*DIPOLE_ENGINE=eager"):
            row_statistics(Factors(x, x), own, [Sum()], torch.full((4,), 3), True)


def test_rounding_to_tf32_follows_every_switch_of_pytorch():
    from dipole.core.objectives.kernels.fused import tf32_allowed

    matmul, before = torch.backends.cuda.matmul, torch.get_float32_matmul_precision()
    switches = {
        "matmul_precision": torch.set_float32_matmul_precision,
        "allow_tf32": lambda value: setattr(matmul, "allow_tf32", value),
        "fp32_precision": lambda value: setattr(matmul, "fp32_precision", value),
    }
    try:
        given = [("matmul_precision", "high"), ("matmul_precision", "highest"), ("allow_tf32", True)]
        given += [("allow_tf32", False), ("fp32_precision", "tf32"), ("fp32_precision", "ieee")]
        given += [("matmul_precision", "high"), ("fp32_precision", "ieee")]
        for number, (switch, value) in enumerate(given):
            switches[switch](value)
            assert tf32_allowed() == (number % 2 == 0), (switch, value)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("labels", [[0, 0, 1, 1, 2, -1], [0] * 6], ids=["lone rows", "one class"])
@pytest.mark.parametrize("spec", ["align_uniform", "infonce(joint=true)", "supcon", "supcon(variant=in)"])
def test_second_derivatives_where_anchors_lack_positives_or_negatives(spec, labels):
    loss = dipole.objective(spec)
    assert torch.autograd.gradgradcheck(lambda z: loss(Pairs.from_labels(z, torch.tensor(labels))).loss, draw(6, 4))
