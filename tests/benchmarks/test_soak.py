"""The soak test: its comparison, its limits, its processes, and a short run of it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dipole.benchmarks.soak.__main__ import Growth
from dipole.benchmarks.soak.judge import differences, left_behind
from dipole.benchmarks.soak.limits import Clock, Disk
from dipole.benchmarks.soak.processes import BrokenError, Processes, Watchdog


def run_with_weights(folder: Path, runs_folder: Any) -> Path:
    """Make a folder of runs with one run and its weights. Return the folder of that run."""
    runs = type(runs_folder)(folder)
    name = runs.record(results={"linear/accuracy": 0.5})
    (folder / name / "model").mkdir()
    save_file({"w": np.zeros(3)}, folder / name / "model" / "module.safetensors")
    return folder / name


def test_differences_finds_every_difference(runs_folder: Any, tmp_path: Path) -> None:
    calm = run_with_weights(tmp_path / "calm", runs_folder).parent
    run = run_with_weights(tmp_path / "runs", runs_folder)
    assert list(differences(calm, run.parent)) == []
    save_file({"w": np.ones(3)}, run / "model" / "module.safetensors")
    assert list(differences(calm, run.parent)) == [f"{run.name}: model/module.safetensors has other contents"]
    (run / "model" / "module.safetensors").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:-1]))
    record = json.loads((run / "record.json").read_text())
    (run / "record.json").write_text(json.dumps(record | {"steps": 7, "wall_seconds": 1}))
    assert list(differences(calm, run.parent)) == [
        f"{run.name}: the record differs in steps",
        f"{run.name}: other lines of metrics",
        f"{run.name}: model/module.safetensors is missing",
    ]


def test_left_behind_finds_all_kinds(runs_folder: Any, tmp_path: Path) -> None:
    run = run_with_weights(tmp_path / "runs", runs_folder)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    assert list(left_behind(run.parent, temporary, set(), {os.getpid()})) == []
    (run / ".record.0123abcd.tmp.json").touch()
    (run / "checkpoints").mkdir()
    (run.parent / ".bench" / "claims").mkdir(parents=True)
    (run.parent / ".bench" / "claims" / "a.json").touch()
    (temporary / "x").touch()
    found = list(left_behind(run.parent, temporary, set(), set()))
    assert len(found) == 4
    assert "left in TMPDIR: x" in found


def test_small_growth_is_flat() -> None:
    assert Growth("vision", 10_000, 600.0, 604.0).is_flat
    assert not Growth("vision", 10_000, 600.0, 620.0).is_flat


def test_a_full_disk_rejects_writes_until_it_is_emptied(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "disk")
    try:
        if not disk.is_mounted:
            pytest.skip("no right to mount")
        with disk.full(), pytest.raises(OSError, match="No space"):
            (disk.folder / "x").write_bytes(bytes(10_000))
        (disk.folder / "x").write_bytes(bytes(10_000))
    finally:
        disk.remove()
    assert not (tmp_path / "disk").exists()


def test_the_clock_says_how_it_jumps(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    assert bool(clock.environment) == clock.how.startswith("LD_PRELOAD")


def test_processes_are_found_by_their_token(tmp_path: Path) -> None:
    processes = Processes(tmp_path, "a-token")
    assert processes.living() == []
    process = processes.start(["timeit", "-n", "1", "-r", "1", "import time; time.sleep(60)"])
    try:
        assert processes.living() == [process.pid]
    finally:
        processes.kill_all()
        process.wait()
    Watchdog(processes, idle_seconds=5).wait_for_all()
    assert processes.living() == []


def test_the_watchdog_notices_endless_waiting_and_computing(tmp_path: Path) -> None:
    processes = Processes(tmp_path, f"waits-{os.getpid()}")
    for program, limits, how in (
        ("import time; time.sleep(60)", {"idle_seconds": 2.0}, "waits"),
        ("while True: pass", {"cpu_seconds": 0.5, "idle_seconds": 60.0}, "computes"),
    ):
        process = processes.start(["timeit", "-n", "1", "-r", "1", program])
        with pytest.raises(BrokenError, match=f"does not end: it {how}"):
            Watchdog(processes, **limits).wait(process)
        processes.kill_all()
        process.wait()
    assert processes.log.read_text().count("most recent call first") == 2
    assert Watchdog(processes).wait(processes.start(["timeit", "-n", "1", "pass"])) == [0]


@pytest.mark.slow
def test_a_short_soak(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dipole.benchmarks.soak", "--minutes", "1", "--updates", "400", "--json"]
    done = subprocess.run([*command, "--into", str(tmp_path / "soak")], capture_output=True, text=True, timeout=1200)
    found = json.loads(done.stdout)
    assert done.returncode == 0, found["broken"]
    assert {event["fault"] for event in found["events"]}
    assert len(found["growth"]) == 3
