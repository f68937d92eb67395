"""The scripts that measure speed and that soak: timing, subjects, differences between runs, processes without end."""

import json
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from itertools import product

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from dipole.benchmarks.soak.__main__ import BrokenError, Soak, differences, left_behind
from dipole.benchmarks.speed import gpu, subjects
from dipole.benchmarks.speed.subjects import TimedLoss
from dipole.benchmarks.speed.timing import Results, floor, interleaved, time_and_memory

CPU = torch.device("cpu")


def test_rounds_floors_and_inputs_of_measurements():
    assert floor(1000, 100, "bf16", {"bf16": 1e12, "bytes": 1e12}) == pytest.approx(0.4)
    assert floor(1000, 100, "float32", {"float32": 1e15, "bytes": 1e6}) == pytest.approx(1200.0)
    seen = []
    found = time_and_memory(lambda: torch.rand(3), lambda x: seen.append(tuple(x.tolist())), CPU)
    assert len(set(seen)) == len(seen) == found["repeats"] + 2
    calls = []
    found = interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2)
    assert calls == ["a", "b"] * 3
    assert set(found) == {"a", "b"}
    names = subjects.subjects(TimedLoss("infonce", 64, 16, "bf16"), CPU)
    for module, name in (("lightly", "lightly"), ("siglip_kernel", "siglip"), ("pytorch_metric_learning", "metric")):
        assert any(name in each for each in names) == bool(find_spec(module))
    assert not any("dense" in name for name in subjects.subjects(TimedLoss("infonce + cllr", 64, 16, "bf16"), CPU))
    case, generator = TimedLoss("infonce", 64, 16, "bf16"), torch.Generator()
    assert [len(view) for view in case.embeddings(CPU, generator, "siglip-kernel")] == [64, 64]
    assert [len(view) for view in case.embeddings(CPU, generator, "dipole")] == [32, 32]


def test_results_of_another_setting_are_dropped(tmp_path):
    out = tmp_path / "results.json"
    Results(out, {"threads": 1}).add("update", "128", {"ours": 1.23456})
    Results(out, {"threads": 1}).add("update", "512", {"ours": 2.0})
    assert json.loads(out.read_text())["update"] == {"128": {"ours": 1.2346}, "512": {"ours": 2.0}}
    Results(out, {"threads": 2}).add("update", "512", {"ours": 3.0})
    assert json.loads(out.read_text()) == {"threads": 2, "update": {"512": {"ours": 3.0}}}


@pytest.mark.parametrize("loss", subjects.DENSE)
def test_plain_pytorch_and_dipole_compute_the_same_loss(loss):
    case = TimedLoss(loss, 40, 12)
    views = case.embeddings(CPU, torch.Generator().manual_seed(0))
    ours, plain = (subjects.BUILD[name](case, CPU)(views) for name in ("dipole", "dense PyTorch"))
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--device", "cpu", "--rows", "63"], "even numbers"),
    (["--device", "cpu", "--losses", "infonc"], "Did you mean"),
    (["--device", "cpu", "--only", "("], "unterminated"),
    (["--device", "toaster"], "allowed are cuda, cuda:N and cpu"),
    (["--device", "meta"], "allowed are cuda, cuda:N and cpu"),
    (["--device", f"cuda:{torch.cuda.device_count()}"], "--device cpu is a dry run"),
])  # fmt: skip
def test_wrong_arguments_are_refused_with_what_is_allowed(arguments, message, capsys):
    with pytest.raises(SystemExit):
        gpu.main(arguments)
    assert message in capsys.readouterr().err


def test_the_script_runs_on_a_processor_and_lists_what_does_not_fit_the_time(capsys, tmp_path):
    out = tmp_path / "cpu.json"
    arguments = ["--device", "cpu", "--rows", "64", "--widths", "16", "--losses", "infonce", "--out", str(out)]
    assert not gpu.main([*arguments, "--only", "^(?!.*compiled)"])
    report = json.loads(out.read_text())
    assert set(report["rates"]) == {"bf16", "float32", "bytes"}
    losses = report["losses"]
    subjects_ = ("dipole", "dense PyTorch", "dipole, eager tiles")
    rows = {(row["loss"], row["dtype"], row["subject"]) for row in losses}
    assert rows >= set(product(["infonce"], ["bf16", "float32"], subjects_))
    for row in losses:
        assert 0 < row["ms"] <= row["median_ms"]
        assert row["floor_ms"] > 0
        assert row.get("engine", "dense") == "dense"  # 64 rows
    assert report["left_out"] == []
    assert "| infonce | 64 | 16 | float32 | dense PyTorch |" in capsys.readouterr().out
    gpu.main([*arguments, "--minutes", "1e-9"])
    report = json.loads(out.read_text())
    assert (report["losses"], report["left_out"][0]) == ([], "infonce, 64, 16, bf16, dipole")
    assert "Left out after 1e-09 minutes" in capsys.readouterr().out


@pytest.mark.slow
def test_parts_of_an_agent_and_compiled_losses_run_on_a_processor(tmp_path, monkeypatch):
    from dipole.benchmarks.speed import rl
    from dipole.rl.envs import control
    from dipole.rl.envs.suite import rendering

    assert min(rl.methods(8, 1).values()) > 0
    monkeypatch.setattr(control, "PAPER_TASKS", ("cartpole-swingup",))
    with suppress(rendering.RenderingError):
        assert min(rl.rendering(1, 1)["cartpole-swingup"].values()) > 0
    found = rl.updates(8, 1, None, CPU)
    assert {"no contrast, float32", rl.STOCK} <= found.keys()
    assert min(found.values()) > 0
    out = tmp_path / "cpu.json"
    gpu.main(["--device", "cpu", "--rows", "64", "--losses", "infonce", "--only", "compiled", "--out", str(out)])
    losses = json.loads(out.read_text())["losses"]
    assert [row["subject"] for row in losses] == ["dense PyTorch, compiled"] * 2


def test_an_error_of_a_library_is_its_result(tmp_path, monkeypatch):
    def full(case, device):
        raise torch.OutOfMemoryError("no room for 17 GB")

    monkeypatch.setitem(subjects.BUILD, "a", full)
    monkeypatch.setitem(subjects.BUILD, "b", lambda case, device: lambda views: views[0].no_such_thing)
    case = TimedLoss("infonce", 64, 16, "float32")
    report = gpu.measure([(case, name) for name in "ab"], CPU, 1.0, tmp_path / "out.json")
    assert report["losses"][0]["error"] == "out of memory"
    assert report["losses"][1]["error"].startswith("AttributeError: ")
    assert "out of memory" in gpu.table(report)


@pytest.mark.gpu
def test_the_script_runs_on_a_gpu(tmp_path):
    out = tmp_path / "gpu.json"
    gpu.main(["--rows", "4096", "--widths", "128", "--losses", "infonce", "--minutes", "3", "--out", str(out)])
    rows = json.loads(out.read_text())["losses"]
    assert next(row for row in rows if row["subject"] == "dipole")["peak_mb"] > 0


@pytest.fixture
def run(runs_folder):
    """Return the folder of a run with weights."""
    folder = runs_folder.path / runs_folder.record(results={"linear/accuracy": 0.5})
    (folder / "model").mkdir()
    save_file({"w": np.zeros(3)}, folder / "model" / "module.safetensors")
    return folder


@pytest.fixture
def soak(tmp_path):
    soak = Soak(tmp_path / "soak", 0)
    yield soak
    soak.end_all()
    if soak.can_fill:
        subprocess.run(["umount", "-l", str(soak.disk)], check=True)


def test_differences_finds_every_difference(run, tmp_path):
    calm = tmp_path / "calm"
    subprocess.run(["cp", "-r", str(run.parent), str(calm)], check=True)
    assert list(differences(calm, run.parent)) == []
    save_file({"w": np.ones(3)}, run / "model" / "module.safetensors")
    assert list(differences(calm, run.parent)) == [f"{run.name}: model/module.safetensors differs"]
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:-1]))
    record = json.loads((run / "record.json").read_text())
    (run / "record.json").write_text(json.dumps(record | {"steps": 7, "wall_seconds": 1}))
    (run / "model" / "module.safetensors").unlink()
    files = ("the record differs in steps", "metrics.jsonl differs", "model/module.safetensors differs")
    assert list(differences(calm, run.parent)) == [f"{run.name}: {what}" for what in files]


def test_left_behind_finds_all_kinds(run, tmp_path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    assert list(left_behind(run.parent, temporary)) == []
    (run / ".record.0123abcd.tmp.json").touch()
    (run / "checkpoints").mkdir()
    (run.parent / ".bench" / "claims").mkdir(parents=True)
    (run.parent / ".bench" / "claims" / "a.json").touch()
    (temporary / "x").touch()
    found = list(left_behind(run.parent, temporary))
    assert len(found) == 4
    assert "left in TMPDIR: x" in found


@pytest.mark.parametrize(("program", "limits"), [
    ("import time; time.sleep(60)", {"idle_seconds": 2.0}),
    ("while True: pass", {"cpu_seconds": 0.5, "idle_seconds": 60.0}),
], ids=["waits", "computes"])  # fmt: skip
def test_notices_endless_processes_and_writes_their_stacks(soak, program, limits):
    process = soak.start(["timeit", "-n", "1", "-r", "1", program])
    assert soak.living() == [process.pid]
    with pytest.raises(BrokenError, match="does not end"):
        soak.wait(process, **limits)
    process.wait()
    assert "most recent call first" in soak.log.read_text()
    assert soak.wait(soak.start(["timeit", "-n", "1", "pass"])) == [0]


@pytest.mark.slow
def test_a_short_soak(tmp_path):
    command = [sys.executable, "-m", "dipole.benchmarks.soak", "--minutes", "1", "--updates", "400", "--json"]
    done = subprocess.run([*command, "--into", str(tmp_path / "soak")], capture_output=True, text=True, timeout=1200)
    events = json.loads(done.stdout)
    assert done.returncode == 0, events
    assert {"vision", "text", "rl"} <= {event["event"] for event in events}
    assert any(event["round"] for event in events)
