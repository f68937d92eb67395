"""What a step costs a GPU: the model against arithmetic by hand, the command with and without a device."""

import json
from importlib.util import find_spec

import pytest
import torch

from dipole.benchmarks.speed import fused as design
from dipole.benchmarks.speed import gpu
from dipole.benchmarks.speed.devices import DEVICES
from dipole.benchmarks.speed.eager import counted
from dipole.benchmarks.speed.fused import MOST_SUMS, Matrix, Summand, fused
from dipole.benchmarks.speed.model import Case, ModelError, modelled
from dipole.benchmarks.speed.subjects import Subject, subjects
from dipole.benchmarks.speed.timing import floor, time_and_memory
from dipole.benchmarks.speed.work import Step, Work, milliseconds, totals

CPU = torch.device("cpu")


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, device="meta", dtype=dtype)


def test_operations_are_counted_with_their_products_bytes_and_exponentials():
    a, b = meta(30, 20), meta(20, 40)

    def run():
        (a @ b).exp_().sum(1)

    assert totals(counted(run)) == {
        "launches": 3,
        "flops": 2 * 30 * 20 * 40,
        "bytes": 4 * (600 + 800 + 1200) + 4 * (1200 + 1200) + 4 * (1200 + 30),
        "exponentials": 1200,
    }


def test_views_and_what_is_empty_cost_nothing():
    a = meta(30, 20)
    assert not counted(lambda: a.T[3:].unsqueeze(1).expand(-1, 7, -1))
    assert not counted(lambda: meta(0, 20).exp())


@pytest.mark.parametrize(
    ("run", "moved"),
    [
        (lambda: meta(100, 100).scatter_(1, meta(100, 2, dtype=torch.int64), 0.0), 200 * 8 + 200 * 4 * 2),
        (lambda: meta(100, 100).gather(1, meta(100, 2, dtype=torch.int64)), 200 * 8 + 200 * 4 * 2),
        (lambda: meta(100, 100).copy_(meta(100)), 400 + 40_000),
        (lambda: meta(100, 1).expand(100, 100) + meta(100, 100), 400 + 80_000),
    ],
)
def test_only_what_is_touched_is_moved(run, moved):
    assert totals(counted(run))["bytes"] == moved


def test_bf16_products_are_told_from_float32():
    work = counted(lambda: meta(8, 8, dtype=torch.bfloat16) @ meta(8, 8, dtype=torch.bfloat16))
    assert [step.precision for step in work] == ["bf16"]


def test_eager_tiles_of_infonce_by_hand():
    # 8192 rows are 2 x 2 tiles of 4096, of which the three to the right of the diagonal are formed, twice.
    (tiles, _) = modelled([Case("infonce", 8192, 64, "float32")])
    entries = 3 * 4096**2
    # Forward and again backward; the gradient has one product on the diagonal and two beside it.
    products = 2 * 64 * (2 * entries + 4 * 4096**2)
    assert tiles["flops"] == pytest.approx(products, rel=1e-3)
    assert tiles["exponentials"] == pytest.approx(2 * entries, rel=1e-3)
    # Each tile is written by its product, read and written by at least an exponential, in both passes.
    assert tiles["bytes"] > 2 * 3 * 4 * entries


def test_fused_kernels_of_a_symmetric_matrix_by_hand():
    # 65,536 rows are 1024 blocks of 64, each with 513 tiles from the diagonal on.
    found = totals(fused(Matrix(65536, 65536, 128, half=True, symmetric=True), [Summand(1, 2.0)]))
    half, whole = 1024 * 513 * 64 * 64, 65536**2
    assert found["flops"] == 2 * 128 * half + 2 * 2 * 128 * whole
    # One for each tile formed, and those with which the shares of the slots are weighed: a few in a thousand.
    assert found["exponentials"] == pytest.approx(half + whole, rel=0.01)
    # 128 slots at a time: five launches forward, each with two fills, a kernel and eight to add up; joined four times.
    launches = 5 * (2 + 1 + 8) + 4 * 2
    # Two for the lists, six for the factors of bf16, two fills and one kernel backward.
    assert found["launches"] == launches + 2 + 6 + 3


def test_fused_kernels_of_two_sides_by_hand():
    # 4096 anchors, 16,384 candidates: each side has a kernel; running maxima cost one exponential a side.
    matrix = Matrix(4096, 16384, 128, half=True, symmetric=False)
    found = totals(fused(matrix, [Summand(2, 100.0, running=True), Summand(1)]))
    entries = 4096 * 16384
    assert found["flops"] == 2 * 128 * entries * (1 + 2 + 2)
    assert found["exponentials"] == pytest.approx(entries * (1 + 1 + 1), rel=0.01)


@pytest.mark.parametrize("symmetric", [True, False])
def test_wide_embeddings_form_a_tile_once_and_write_its_slopes(symmetric):
    # 8192 columns in float32 are 8192 anchors to 256 MB: one band.
    matrix = Matrix(8192, 8192, 768, half=False, symmetric=symmetric)
    forward = totals(design.forward(matrix, [Summand(1, 2.0)]))
    backward = totals(design.backward(matrix, [Summand(1, 2.0)]))
    entries = 8192**2
    assert backward["flops"] == 2 * 768 * entries * (2 if symmetric else 3)
    assert backward["exponentials"] == entries
    # Written once, and read by each product.
    moved = 4 * entries * (2 if symmetric else 3)
    assert moved < backward["bytes"] < 2 * moved
    assert forward["flops"] == pytest.approx(2 * 768 * entries * (0.5 if symmetric else 1), rel=0.01)
    wide = Matrix(65536, 65536, 768, half=True, symmetric=True)
    assert totals(design.backward(wide, [Summand(1, 2.0)]))["launches"] == 1 + 1 + 32 * 3  # 2048 anchors at a time


def test_many_sums_visit_the_whole_matrix():
    few, many = (
        totals(fused(Matrix(8192, 8192, 64, half=True, symmetric=True), [Summand(count)]))
        for count in (MOST_SUMS, MOST_SUMS + 1)
    )
    assert many["flops"] - few["flops"] == pytest.approx(2 * 64 * 8192**2 / 2, rel=0.02)


def test_time_is_the_slowest_of_products_memory_exponentials_and_launches():
    h100 = DEVICES["H100"]
    work = Work({Step(flops=989.4e9, precision="bf16"): 2, Step(bytes=3.35e9): 3, Step(flops=66.9e9, bytes=3.35e6): 1})
    found = milliseconds(work, h100)
    assert found["products"] == pytest.approx(3.0)
    assert found["bytes"] == pytest.approx(3.001)
    assert found["launches"] == pytest.approx(0.03)
    assert found["at least"] == pytest.approx(6.0)
    assert milliseconds(Work({Step(): 1000}), h100)["at least"] == pytest.approx(5.0)


def test_the_floor_by_hand():
    # 4 rows^2 d operations at 1 TFLOP/s, or three times the rows at 1 MB/s.
    assert floor(1000, 100, "bf16", {"bf16": 1e12, "bytes": 1e12}) == pytest.approx(0.4)
    assert floor(1000, 100, "float32", {"float32": 1e15, "bytes": 1e6}) == pytest.approx(1200.0)


@pytest.mark.parametrize("loss", ["swav(prototypes=8, dim=16)", "infonce(similarity=bilinear)"])
def test_a_loss_that_the_model_does_not_cover_is_refused(loss):
    with pytest.raises(ModelError, match="the model covers losses"):
        list(modelled([Case(loss, 4096, 16, "bf16")]))


@pytest.mark.parametrize("loss", ["infonce+dp", "cacr", "dcl", "hcl", "align_uniform", "triplet"])
def test_objectives_of_one_matrix_are_modelled(loss):
    tiles, kernels = modelled([Case(loss, 8192, 32, "bf16")])
    assert kernels["launches"] < tiles["launches"] or tiles["launches"] < 400
    assert kernels["bytes"] < tiles["bytes"] / 3


def test_the_model_has_the_numbers_of_the_kernels():
    pytest.importorskip("triton")
    from dipole.core.objectives.kernels import launch

    for half in (True, False):
        for name in ("FORWARD", "BACKWARD", "BANDED", "SQUARE"):
            assert getattr(launch, name)[half][0].own == getattr(design, name)[half]
    for name in ("MOST_SUMS", "SHORTEST", "WIDEST", "BAND"):
        assert getattr(launch, name) == getattr(design, name)


def test_without_a_gpu_the_model_is_printed(capsys, tmp_path):
    out = tmp_path / "model.json"
    assert not gpu.main(
        ["--model", "--losses", "infonce", "--rows", "4096", "--widths", "128", "--devices", "A100", "--out", str(out)]
    )
    text = capsys.readouterr().out
    assert text.startswith("MODELLED, not measured")
    assert "| infonce | 4096 | 128 | bf16 | fused |" in text
    assert "A100: 312 TFLOP/s bf16" in text
    assert "B200: " not in text
    report = json.loads(out.read_text())
    assert report["modelled"] is True
    assert set(report["devices"]) == set(DEVICES)
    assert len(report["cases"]) == 4
    for row in report["cases"]:
        assert set(row) == {
            *("loss", "rows", "width", "dtype", "engine"),
            *("launches", "flops", "bytes", "exponentials", "milliseconds"),
        }
        assert set(row["milliseconds"]) == set(DEVICES)
        assert set(row["milliseconds"]["H100"]) == {"products", "bytes", "exponentials", "launches", "at least"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "--rows", "63"], "even numbers above 0"),
        (["--model", "--rows", "many"], "--rows 'many'"),
        (["--model", "--widths", "0"], "--widths '0': give numbers above 0"),
        (["--model", "--dtypes", "int8"], "there is no int8; allowed are bf16, float32"),
        (["--model", "--devices", "H900", "--losses", "infonce", "--rows", "64"], "there is no H900"),
        (["--model", "--losses", "infonc"], "Did you mean"),
        (["--model", "--losses", "swav", "--rows", "64"], "the model covers"),
        (["--model", "--device", "cpu"], "leave one of them out"),
        (["--model", "--minutes", "0"], "give a number above 0"),
        (["--model", "--only", "("], "is no regular expression"),
        (["--device", "cpu", "--parts", "everything"], "allowed are losses, simclr, agent"),
        (["--device", "toaster"], "allowed are cuda, cuda:N and cpu"),
        (["--device", "meta"], "allowed are cuda, cuda:N and cpu"),
    ],
)
def test_wrong_arguments_are_refused_with_what_is_allowed(arguments, message, capsys):
    with pytest.raises(SystemExit):
        gpu.main(arguments)
    assert message in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--device", f"cuda:{torch.cuda.device_count()}"])
    assert "GPUs; without one, --model prints costs" in capsys.readouterr().err


def test_the_measuring_runs_on_a_processor(capsys, tmp_path):
    out = tmp_path / "cpu.json"
    arguments = ["--device", "cpu", "--rows", "64", "--widths", "16", "--losses", "infonce"]
    assert not gpu.main([*arguments, "--parts", "losses", "--only", "^(?!.*compiled)", "--out", str(out)])
    report = json.loads(out.read_text())
    assert report["modelled"] is False
    assert set(report["rates"]) == {"bf16", "float32", "bytes"}
    losses = report["losses"]
    assert {(row["loss"], row["dtype"], row["subject"]) for row in losses} >= {
        ("infonce", dtype, subject)
        for dtype in ("bf16", "float32")
        for subject in ("dipole", "dense PyTorch", "dipole, eager tiles")
    }
    for row in losses:
        assert 0 < row["ms"] <= row["median_ms"]
        assert row["floor_ms"] > 0
        assert row.get("engine", "eager") == "eager"
    assert report["left_out"] == []
    assert "| infonce | 64 | 16 | float32 | dense PyTorch |" in capsys.readouterr().out


def test_a_step_of_simclr_runs_on_a_processor(tmp_path):
    out = tmp_path / "cpu.json"
    gpu.main(["--device", "cpu", "--parts", "simclr", "--out", str(out)])
    (row,) = json.loads(out.read_text())["simclr"]
    assert row["share_outside_encoder"] < 1
    assert row["images_per_second"] == pytest.approx(1e3 * row["images"] / row["ms"])


@pytest.mark.slow
def test_an_agent_and_compiled_losses_run_on_a_processor(tmp_path):
    out = tmp_path / "cpu.json"
    arguments = ["--device", "cpu", "--parts", "agent,losses", "--rows", "64", "--losses", "infonce"]
    gpu.main([*arguments, "--only", "compiled", "--out", str(out)])
    report = json.loads(out.read_text())
    assert [row["precision"] for row in report["agent"]] == ["float32", "bf16"]
    assert all(row["updates_per_second"] > 0 for row in report["agent"])
    assert [row["subject"] for row in report["losses"]] == ["dense PyTorch, compiled"] * 2


def test_what_does_not_fit_the_time_is_named(capsys, tmp_path):
    out = tmp_path / "cpu.json"
    gpu.main(["--device", "cpu", "--minutes", "1e-9", "--rows", "64", "--out", str(out)])
    report = json.loads(out.read_text())
    assert not report["losses"]
    assert report["left_out"][0] == "losses: infonce, 64, 16, bf16, dipole"
    assert "agent: 4, [8], float32" in report["left_out"]
    assert "Left out after 1e-09 minutes" in capsys.readouterr().out


def test_a_library_that_fails_has_that_as_its_result(tmp_path):
    def full(case, device):
        raise torch.OutOfMemoryError("no room for 17 GB")

    def broken(case, device):
        return lambda views: views[0].no_such_thing

    case = Case("infonce", 64, 16, "float32")
    todo = [gpu._job_of_loss(case, Subject(name, build), CPU) for name, build in [("a", full), ("b", broken)]]
    report = gpu.measure(todo, CPU, 1.0, tmp_path / "out.json")
    assert report["losses"][0]["error"] == "out of memory"
    assert report["losses"][1]["error"].startswith("AttributeError: ")
    assert "out of memory" in gpu.table_of_measured(report)


def test_libraries_that_are_not_installed_are_no_subjects():
    names = [subject.name for subject in subjects(Case("infonce", 64, 16, "bf16"), CPU)]
    for module, name in (("lightly", "lightly"), ("siglip_kernel", "siglip"), ("pytorch_metric_learning", "metric")):
        assert any(name in each for each in names) == bool(find_spec(module))
    assert not any("dense" in subject.name for subject in subjects(Case("infonce + cllr", 64, 16, "bf16"), CPU))


def test_every_repeat_has_inputs_of_its_own():
    seen = []
    found = time_and_memory(lambda: torch.rand(3), lambda x: seen.append(tuple(x.tolist())), CPU)
    assert len(set(seen)) == len(seen) == found["repeats"] + 2


def test_views_of_two_encoders_have_all_rows_each():
    case, generator = Case("infonce", 64, 16, "bf16"), torch.Generator()
    assert [len(v) for v in Subject("", subjects, pairs=True).views(case, CPU, generator)] == [64, 64]
    assert [len(v) for v in Subject("", subjects).views(case, CPU, generator)] == [32, 32]


@pytest.mark.gpu
def test_the_measuring_runs_on_a_gpu(tmp_path):
    out = tmp_path / "gpu.json"
    gpu.main(["--rows", "4096", "--widths", "128", "--losses", "infonce", "--minutes", "3", "--out", str(out)])
    rows = json.loads(out.read_text())["losses"]
    assert next(row for row in rows if row["subject"] == "dipole")["peak_mb"] > 0
