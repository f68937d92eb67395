"""The fused kernels: interpreted, beside float64, run on a GPU (`make gpu`) and compiled for three (`make kernels`)."""

import inspect
import json
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass, replace
from importlib.util import module_from_spec, spec_from_file_location
from unittest import TestCase

import pytest
import torch

import dipole
from dipole import Between, Count, Extreme, LogSumExp, Pairs, SoftmaxMean, Softplus, Statistic, Sum
from dipole.core.conformance.kit import all_subjects, check_objective, subject_of
from dipole.core.objectives import engine
from dipole.core.objectives.engine import row_statistics
from dipole.core.objectives.similarity import Factors
from dipole.core.objectives.tiles import MatrixPass
from tests.core.test_engines import check_rows_without_negatives
from tests.kernel_processes import INTERPRETED, compiling_for, needs_triton, process, resources

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
SEVERAL = [LogSumExp(2.0), LogSumExp(100.0), SoftmaxMean(4.0), SoftmaxMean(-120.0), Sum()]
EVERYTHING = [*SEVERAL, Between(0.0, 0.8), Softplus(10.0, -10.0), Count(-0.2, 0.4), Extreme(), Extreme(largest=False)]


@dataclass(frozen=True)
class Cauchy(Statistic):
    """sum_j 1 / (1 + width (1 - s_ij)). `with_kernel` adds its kernel functions."""

    width: float = 3.0

    def parts(self, s, e):
        return 1 / (1 + self.width * (1 - s))


@dataclass(frozen=True)
class Square(Statistic):
    """sum_j s^2 e^{scale s} and sum_j e^{scale s}: a statistic with a scale and two sums."""

    weight: float
    scale: float = 90.0

    def parts(self, s, e):
        return self.weight * s * s * e, e

    def finish(self, sums, shift, count):
        return sums[0] / sums[1].clamp_min(1e-30)


USERS_FUNCTIONS = """
import triton
import triton.language as tl


@triton.jit
def cauchy(s, e, numbers):
    return (1.0 / (1.0 + numbers[0] * (1.0 - s)),)


@triton.jit
def cauchy_slope(s, e, numbers):
    value = 1.0 / (1.0 + numbers[0] * (1.0 - s))
    return (numbers[0] * value * value,)


@triton.jit
def square(s, e, numbers):
    return numbers[1] * s * s * e, e


@triton.jit
def square_slope(s, e, numbers):
    return numbers[1] * (2.0 * s + numbers[0] * s * s) * e, numbers[0] * e
"""


def module_of(path, text):
    """Write and import a module, as a user's would be: Triton reads the source of its functions from the file."""
    path.write_text(text)
    spec = spec_from_file_location(path.stem, path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BODIES = {}


def run_body(name, given):
    BODIES[name](**given)


def in_interpreter(body):
    """Make a test of a function that runs where kernels are interpreted, or here if its `device` is "cuda"."""

    def test(interpreted, **given):
        if given.get("device") == "cuda":
            body(**given)
        else:
            interpreted(run_body, body.__name__, given)

    BODIES[body.__name__] = body
    process = inspect.Parameter("interpreted", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    test.__signature__ = inspect.Signature([process, *inspect.signature(body).parameters.values()])
    test.__name__, test.pytestmark = body.__name__, getattr(body, "pytestmark", [])
    return needs_triton(test)


@pytest.fixture(scope="module")
def interpreted():
    """Calls a function of this module where kernels are interpreted."""
    with process(INTERPRETED) as call:
        yield call


@pytest.fixture(scope="module")
def compiled():
    """Calls a function of this module where kernels are compiled."""
    with process({}) as call:
        yield call


MATRICES = ("symmetric", "wide", "queue", "lists", "none excluded", "first")


def rows(count, width, seed, dtype=torch.float32):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def unit(*args):
    return torch.nn.functional.normalize(rows(*args), dim=1)


def matrices(name):
    """Return x, y, excluded, counts, symmetric and first of a matrix."""
    if name == "lists":  # long lists, repeated and padded. Row 7 has no negative
        x = unit(19, 5, 3)
        excluded = torch.randint(-1, 19, (19, 12), generator=torch.Generator().manual_seed(4))
        excluded = torch.cat([excluded, torch.full((19, 10), -1)], 1)
        excluded[7, :19] = torch.arange(19)
        counts = torch.tensor([19 - len(set(row) - {-1}) for row in excluded.tolist()])
        return x, x, excluded, counts, False, 0
    if name == "none excluded":
        return unit(3, 1, 5), unit(21, 1, 6), torch.zeros(3, 0, dtype=torch.long), torch.full((3,), 21), False, 0
    if name == "first":
        excluded = torch.tensor([[i, 8 + i, -1] for i in range(9)])
        counts = torch.full((9,), 21 - 7) - torch.tensor([int(i >= 7) + 1 for i in range(9)])
        return unit(9, 7, 7), unit(21, 7, 8), excluded, counts, False, 7
    pairs = {
        # Four blocks of 16 rows, the last one partly filled. Four bands of 16 rows.
        "symmetric": Pairs.from_views([unit(29, 13, 0), unit(29, 13, 1)]),
        # Embeddings wider than what is multiplied at a time.
        "wide": Pairs.cross(unit(17, 37, 0), unit(17, 37, 1), unit(6, 37, 2)),
        # Few anchors, many candidates: split over three programs.
        "queue": Pairs.cross(unit(9, 8, 0), unit(9, 8, 1), unit(191, 8, 2)),
    }[name]
    return pairs.anchors, pairs.candidates, pairs.excluded, pairs.negative_counts, name == "symmetric", 0


def values_and_gradients(name, dtype, statistics, kernels, device):
    """Every statistic of a matrix, and the gradients of a sum of them."""
    x, y, excluded, counts, symmetric, first = matrices(name)
    leaves = [x.to(device, dtype).requires_grad_()]
    leaves += [] if y is x else [y.to(device, dtype).requires_grad_()]
    excluded, counts = excluded.to(device), counts.to(device)
    with engine.using("triton" if kernels else "eager"):
        before, factors = engine.served(), Factors(leaves[0], leaves[-1], 1.0)
        found = row_statistics(factors, excluded, statistics, counts, symmetric, first)
        assert engine.served() == before + kernels, engine.failures()
        source, loss = torch.Generator().manual_seed(9), 0.0 * sum(leaf.sum() for leaf in leaves)
        for statistic in [each for each in statistics if not isinstance(each, Extreme | Count)]:
            value = torch.where(counts > 0, found[statistic], 0.0)
            weights = torch.rand(len(x), generator=source).to(value)
            loss = loss + (weights * value).sum() / value.detach().norm().clamp_min(1)
        return [*(found[statistic].detach() for statistic in statistics), *torch.autograd.grad(loss, leaves)]


def compare(name, statistics, device="cpu"):
    """Compare kernels with tiles, and of two matrices with themselves: called again they give the same bits."""
    from dipole.core.objectives.kernels import fused

    fused.INTERPRETED = fused.ProgramShape(16, 16, 16, 4, 1)
    ours = values_and_gradients(name, torch.float32, statistics, True, device)
    if name in ("symmetric", "queue") and statistics == EVERYTHING:
        again = values_and_gradients(name, torch.float32, statistics, True, device)
        assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    theirs = values_and_gradients(name, torch.float64, statistics, False, device)
    for one, other in zip(ours, theirs, strict=True):
        if one.is_floating_point():
            torch.testing.assert_close(one, other.float(), rtol=2e-4, atol=2e-5)
        else:
            assert torch.equal(one, other)


FEW = [[Sum()], [LogSumExp(100.0), Extreme()]]
COMPARED = [
    *((name, EVERYTHING, "cpu") for name in MATRICES),
    *(("symmetric", FEW[0], "cpu"), ("lists", FEW[0], "cpu"), ("queue", FEW[1], "cpu")),
    ("queue", [Extreme(largest=False)], "cpu"),  # extremes alone need no sum
    *(pytest.param(name, each, "cuda", marks=ON_GPU) for name in MATRICES for each in (*FEW, SEVERAL, EVERYTHING)),
]


@in_interpreter
@pytest.mark.parametrize(("name", "statistics", "device"), COMPARED)
def test_kernels_equal_tiles_in_float64(name, statistics, device):
    compare(name, statistics, device)


@in_interpreter
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["symmetric", "wide"])
def test_a_users_statistic_brings_its_kernel_functions(name, tmp_path, device):
    module = module_of(tmp_path / "users.py", USERS_FUNCTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cauchy, "kernel", (module.cauchy, module.cauchy_slope))
        patch.setattr(Square, "kernel", (module.square, module.square_slope))
        assert engine.outlook([Cauchy(), Square(1.0)]) == "kernels on a GPU, tiles on a processor"
        compare(name, [Cauchy(), Square(2.0), LogSumExp(100.0), Cauchy(1.0)], device)


@in_interpreter
def test_only_a_statistic_without_kernel_functions_runs_in_tiles():
    with TestCase().assertLogs("dipole", "WARNING") as seen:
        for _ in range(2):
            compare("symmetric", [Cauchy(), LogSumExp(2.0), Extreme()])
    (record,) = seen.records
    assert "tiles compute Cauchy: it has no kernel functions" in record.getMessage()


def test_statistics_without_kernel_functions_run_in_tiles():
    assert engine.outlook([Sum(), Cauchy()]).endswith("tiles everywhere for Cauchy: it has no kernel functions")
    assert engine.outlook([Cauchy()]).startswith("tiles everywhere: Cauchy")
    doubled = type("Doubled", (Sum,), {"parts": lambda self, s, e: 2 * s})
    assert Sum.kernel is not None
    assert "no kernel functions" in engine.unsupported_reason(doubled())


SUM = "infonce(temperature=0.01) + 0.1*dp + dcl(similarity=dot) + triplet"
NO_STATISTICS = {"swav", "cllr", "regression", "vicreg", "barlow_twins", "siglip"}  # siglip's numbers are learned
CHECKED = [
    *(pytest.param(name, "cpu", marks=[] if name in NO_STATISTICS else [pytest.mark.slow]) for name in all_subjects()),
    (SUM, "cpu"), pytest.param(SUM, "every", marks=pytest.mark.slow),
    *(pytest.param(name, "cuda", marks=ON_GPU) for name in (*all_subjects(), SUM)),
]  # fmt: skip


@in_interpreter
@pytest.mark.parametrize(("text", "device"), CHECKED)
def test_objectives_by_kernels_equal_their_loops_on_every_layout(text, device):
    """The check "kernels" of `dipole check`: the worst error on every layout of pairs, of the sum on every third."""
    subject = subject_of(text)
    if (text, device) == (SUM, "cpu"):
        subject = replace(subject, layouts=subject.layouts[::3])
    with engine.using("triton"):
        row = check_objective(subject, only=["kernels"]).rows[0]
    assert row.outcome == ("-" if text in NO_STATISTICS else "ok"), row.detail


@in_interpreter
def test_rows_without_negatives():
    check_rows_without_negatives(unit(4, 3, 0))
    assert not engine.failures()


@in_interpreter
def test_second_derivatives_are_refused_and_learned_temperatures_fall_back_to_tiles():
    x, y = (rows(7, 5, seed).requires_grad_() for seed in (1, 2))
    before = engine.served()
    value = dipole.objective("infonce + 0.1*dp")(x, y).loss
    served = engine.served()
    assert served > before
    with pytest.raises(engine.EngineError, match=r"second derivatives.*DIPOLE_ENGINE=dense"):
        torch.autograd.grad(value, [x, y], create_graph=True)
    term = dipole.objective("infonce(temperature=learned)")
    loss = term(x, y).loss
    assert engine.served() == served
    with engine.using("dense"):
        torch.testing.assert_close(loss, term(x, y).loss)
    assert "learned" in engine.outlook(term.terms[0].statistics().values())


@in_interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [24, 40])
def test_half_precision_embeddings_are_multiplied_before_normalisation(dtype, width):
    leaves = [rows(7, width, seed, dtype).requires_grad_() for seed in (0, 1)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    objective = dipole.objective("infonce(temperature=0.02) + 0.1*dp")
    before = engine.served()
    ours, theirs = objective(*leaves).loss, objective(*exact).loss
    assert engine.served() == before + 1
    ours.backward()
    theirs.backward()
    # The products of half-precision numbers are exact: rounded rows would be 1e-3 off.
    assert float(abs(ours - theirs) / theirs) < 1e-5
    assert all((a.grad.double() - b.grad).norm() < 0.01 * b.grad.norm() for a, b in zip(leaves, exact, strict=True))


@in_interpreter
@pytest.mark.parametrize(("part", "what"), [("sums", "Sum() is off"), ("gradients", "the gradient is off")])
def test_wrong_kernels_fail_the_self_check_and_tiles_take_over(part, what):
    from dipole.core.objectives.kernels.fused import Launcher

    correct = getattr(Launcher, part)

    def wrong(self, *args):
        first, *others = correct(self, *args)
        return first * 1.05, *others

    x, own = unit(6, 9, 0), torch.arange(6).unsqueeze(1)
    engine._selfchecks.clear()
    engine._warned.clear()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as seen:
        patch.setattr(Launcher, part, wrong)
        warnings.simplefilter("always")
        for wanted in ([SoftmaxMean(3.0), Sum()], [SoftmaxMean(3.0), Sum()], [Sum()]):
            found = row_statistics(Factors(x, x, 1.0), own, wanted, torch.full((6,), 5), True)[Sum()]
    assert len(engine.failures()) == 2
    engine._selfchecks.clear()
    torch.testing.assert_close(found, (x @ x.T).fill_diagonal_(0).sum(1))
    # NumPy warns about the interpreter's arithmetic.
    (message,) = [str(each.message) for each in seen if "self-check" in str(each.message)]
    assert what in message
    assert "eager tiles" in message


@in_interpreter
def test_the_self_check_passes_on_another_default_device_and_few_anchors_split_their_candidates():
    from dipole.core.objectives.kernels.fused import Launcher, Operand, key_of

    x, y, excluded, *_ = matrices("queue")
    problem = MatrixPass(Factors(x, y), excluded, False, (), (), ())
    one_half = Factors(x, y, None, (x.bfloat16(), y))  # as of class vectors: both sides are read in float32
    assert key_of(problem) == key_of(replace(problem, factors=one_half))
    assert Launcher(problem, Operand(x), Operand(y), excluded.int())._splits()[0] == 3
    x, own = unit(6, 9, 0), torch.arange(6).unsqueeze(1)
    engine._selfchecks.clear()
    with torch.device("meta"):  # as torch.set_default_device
        row_statistics(Factors(x, x, 1.0), own, [Sum()], torch.full((6,), 5, device="cpu"), True)
    assert engine.failures() == []


# Compiled -------------------------------------------------------------------------------------------------------------


def compiled_for(architecture, x, lengths, listed, symmetric, statistics, running, extremes=(), backward=False):
    """Compile the forward and perhaps the backward kernel of rows against themselves."""
    from dipole.core.objectives.kernels.fused import Launcher, Operand
    from dipole.core.objectives.statistics import part_count

    side, lists = Operand(x, lengths), torch.zeros(len(x), listed, dtype=torch.int32)
    problem = MatrixPass(Factors(x, x), lists, symmetric, statistics, running, extremes)
    launcher = Launcher(problem, side, side, lists)
    with compiling_for(architecture) as built:
        launcher.sums()
        if backward:
            upstream, counts = torch.zeros(sum(map(part_count, statistics)), 64), torch.zeros(len(statistics), 64)
            launcher.gradients(x.float(), x.float(), upstream, counts, False)
    return built


def machine_code(statistics, half, width, symmetric, listed, architecture):
    """Compile the forward and the backward kernel. Return resources, shared memory and PTX of each."""
    x = torch.zeros(64, width, dtype=torch.bfloat16 if half else torch.float32)
    summed = tuple(each for each in statistics if isinstance(each, Statistic))
    extremes = tuple(each for each in statistics if isinstance(each, Extreme))
    running = tuple(abs(each.scale or 0) > 60 for each in summed)
    given = architecture, x, torch.zeros(64) if half else None, listed, symmetric, summed, running, extremes
    built = compiled_for(*given, backward=bool(summed))
    return [(resources(each.asm["cubin"]), each.metadata.shared, each.asm["ptx"]) for each in built]


TENSOR_CORES = {80: "mma.sync", 86: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
SHARED = {80: 163, 86: 99, 90: 227, 100: 227}  # KiB of shared memory of a program
CASES = [
    *((statistics, 2, half, width) for statistics in (SEVERAL, EVERYTHING) for half in (0, 1) for width in (128, 768)),
    *(([LogSumExp(100.0)], listed, half, 13) for listed in (0, 2, 20) for half in (0, 1)),
    *(([each], 2, 1, 128) for each in EVERYTHING),
]


@needs_triton
@pytest.mark.kernels
@pytest.mark.parametrize("architecture", TENSOR_CORES)
@pytest.mark.parametrize(("statistics", "listed", "half", "width"), CASES)
def test_kernels_compile_without_spilling(compiled, statistics, listed, half, width, architecture):
    for symmetric in (False, True):
        forward, *backward = compiled(machine_code, statistics, half, width, symmetric, listed, architecture)
        for usage, shared, ptx in (forward, *backward):
            assert usage["LOCAL"] == 0
            # Eight statistics and two extremes in one pass, of which no objective has more than four.
            most = 64 if statistics == EVERYTHING else 8
            assert usage["STACK"] <= (72 if architecture == 86 and width > 128 else most)
            assert shared <= SHARED[architecture] * 1024
            assert not re.search(r"\b(atom|red)\.", ptx)
            assert ("tf32" in ptx) == (not half)  # three TF32 products, as accurate as float32's
        assert TENSOR_CORES[architecture] in forward[2]


def hash_of_forward(statistics, anchors=64):
    """Compile the forward kernel in float32 for sm_90 and return its hash."""
    x, running = torch.zeros(anchors, 16), (False,) * len(statistics)
    return compiled_for(90, x, None, 1, False, statistics, running)[0].hash


def hash_of_functions(path, text):
    module = module_of(path, text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cauchy, "kernel", (module.cauchy, module.cauchy_slope))
        return hash_of_forward((Cauchy(),))


@needs_triton
def test_editing_a_statistics_function_compiles_a_new_kernel(compiled, tmp_path):
    edited = USERS_FUNCTIONS.replace("numbers[0] * (1.0 - s)),)", "numbers[0] * (1.0 - s * s)),)")
    texts = enumerate([USERS_FUNCTIONS, edited, USERS_FUNCTIONS])
    first, other, again = (compiled(hash_of_functions, tmp_path / f"version{n}.py", text) for n, text in texts)
    assert first != other
    assert first == again


@needs_triton
def test_other_temperatures_and_batch_sizes_reuse_a_kernel(compiled):
    sizes = ((0.5, 64), (1.0, 63), (0.07, 1), (2.0, 48))
    found = {compiled(hash_of_forward, (LogSumExp(1 / number), SoftmaxMean(number)), rows) for number, rows in sizes}
    assert len(found) == 1


# On a GPU, or without -------------------------------------------------------------------------------------------------


def loss_and_gradients(objective, layout, leaves):
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    loss = objective(Pairs.from_views(leaves) if layout == "views" else Pairs.cross(*leaves)).loss
    return loss.detach(), *torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("text", ["infonce(temperature=0.02) + 0.1*dp", "hcl", "cacr", "align_uniform"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [128, 768])
@pytest.mark.parametrize(("layout", "sizes"), [("views", (3001, 3001)), ("queue", (1025, 1025, 20011))])
def test_thousands_of_rows_on_a_gpu(layout, sizes, width, dtype, text, device):
    source = torch.Generator(device).manual_seed(1)
    leaves = [torch.randn(size, width, generator=source, device=device).to(dtype) for size in sizes]
    objective, before = dipole.objective(text).to(device), engine.served()
    first, again = (loss_and_gradients(objective, layout, leaves) for _ in range(2))
    assert engine.served() > before, engine.failures()
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    true = loss_and_gradients(objective.double(), layout, [leaf.double() for leaf in leaves])
    assert float(abs(first[0] - true[0]) / abs(true[0])) < 1e-5
    limit = 0.01 if dtype == torch.bfloat16 else 1e-4
    for one, other in zip(first[1:], true[1:], strict=True):
        assert float((one.double() - other).norm() / other.norm()) < limit


OF_VIEWS = """
from dipole import Objective, PairsError, Sum
class OfViews(Objective):
    def __init__(self):
        super().__init__("cosine")
    def prepare(self, pairs):
        if pairs.anchors is not pairs.candidates or len(pairs.anchors) > 10:
            raise PairsError("two views alone, for which the interpreter is quick")
        return pairs
    def statistics(self):
        return {"negatives": Sum()}
    def loss(self, positive, rows):
        return rows.negatives - rows.over_positives(positive)
"""


@pytest.mark.slow
@needs_triton
def test_check_runs_with_kernels(tmp_path, monkeypatch):
    for name in ("DIPOLE_ENGINE", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "views.py").write_text(OF_VIEWS)
    words = ["check", "--engine", "triton", "views:OfViews", "--only", "kernels", "--json"]
    done = subprocess.run([sys.executable, "-m", "dipole", *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    ((row,),) = [report["checks"] for report in json.loads(done.stdout)]
    assert row["outcome"] == "ok"
    assert "sweeps" in row["detail"]
