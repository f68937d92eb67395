"""The soak test: its comparison, its processes, and a short run of it."""

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from dipole.benchmarks.soak.__main__ import BrokenError, Soak, differences, left_behind


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


@pytest.mark.parametrize(
    ("program", "limits"),
    [
        ("import time; time.sleep(60)", {"idle_seconds": 3.0}),
        ("while True: pass", {"cpu_seconds": 0.5, "idle_seconds": 60.0}),
    ],
    ids=["waits", "computes"],
)
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
