"""`dipole bench`: killed and started again, failures, missing data, and what the terminal shows."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from dipole.benchmarks import commands
from dipole.benchmarks.manifest import BENCH, read_records
from dipole.benchmarks.report.table import Cell, ReportTable
from dipole.benchmarks.run import bench
from dipole.benchmarks.run import engine as engines
from dipole.benchmarks.run.engine import EngineTask, LocalEngine, PoolEngine
from dipole.benchmarks.run.worker import locked
from dipole.core.cli import main
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.machine import processors
from tests.benchmarks.conftest import Here, suite_text, wait_for
from tests.systems import kill_all, posix

SETTINGS = ("train.epochs=2", "train.checkpoint_every=1", "vision.probe.baselines=false", "vision.probe.probes=['knn']")
BROKEN = ("broken", "infonce", "train.learning_rate=1e30")
ROWS = [("infonce", "infonce"), BROKEN, ("dcl", "dcl")]
POINTS = ("train.steps=4", "train.batch_size=32", "toy.points=64", "toy.test_points=40")


def write_suite(folder, rows=ROWS, *columns, **more):
    (folder / "tiny.toml").write_text(suite_text(rows, *columns, **{"set": SETTINGS, **more}))


def start(folder):
    command = [sys.executable, "-m", "dipole", "bench", "tiny.toml", "--jobs", "1", "--threads", "1"]
    output = (folder / "output.txt").open("a")
    return subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, start_new_session=True)


def finished(folder):
    return read_records(folder / "runs").done if (folder / "runs").is_dir() else {}


def starts(folder):
    """How often a worker was started, by run."""
    logs = (folder / "runs" / BENCH / "logs").glob("*.log")
    return {log.stem: log.read_text().count("== ") for log in logs}


def lines(run):
    whole = (run / "metrics.jsonl").read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def steps(run):
    return [line["step"] for line in lines(run) if "train/loss" in line]


def claimed(folder):
    """Process ids of the workers that hold a claim."""
    found = []
    for path in (folder / "runs" / BENCH / "claims").glob("*.json"):
        with suppress(FileNotFoundError):
            found.append(json.loads(path.read_text())["pid"])
    return found


def assert_whole(folder, count):
    done = finished(folder)
    assert len(done) == count
    for name, record in done.items():
        found = steps(folder / "runs" / name)
        assert found == sorted(set(found))
        assert lines(folder / "runs" / name)[-1]["step"] == record.steps
        assert (folder / "runs" / BENCH / "logs" / f"{name}.log").read_text().count("finished ") == 1
    assert claimed(folder) == []
    return done


@pytest.mark.slow
def test_continues_after_a_kill_without_losing_or_repeating_a_run(tmp_path, monkeypatch):
    write_suite(tmp_path, recipe="gaussian-classes", set=POINTS)
    runner = start(tmp_path)
    first = next(iter(wait_for(lambda: finished(tmp_path), "finished run")))
    claims = tmp_path / "runs" / BENCH / "claims"
    wait_for(lambda: [p for p in claims.glob("*.json") if p.stem != first], "claim of the second run")
    kill_all(runner)
    runner.wait()
    record = tmp_path / "runs" / first / "record.json"
    before = record.stat().st_mtime_ns

    assert start(tmp_path).wait(600) == 1
    output = (tmp_path / "output.txt").read_text()
    assert "1 of 3 runs is finished already" in output
    assert "1 run done, 1 finished before, 1 failed" in output
    assert "again: dipole train gau" in output
    broken = next(line for line in output.splitlines() if line.strip().startswith("log:")).split()[-1]
    assert "not finite" in (tmp_path / broken).read_text()
    assert (record.stat().st_mtime_ns, starts(tmp_path)[first]) == (before, 1)
    done = finished(tmp_path)
    assert {r.objective for r in done.values()} == {"infonce", "dcl"}
    assert not list(claims.glob("*.json"))

    # A third time: nothing but the failed job is tried.
    attempts = starts(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "tiny.toml", "--jobs", "1", "--threads", "1"]) == 1
    tried = {name for name, count in starts(tmp_path).items() if count > attempts[name]}
    assert tried == attempts.keys() - done.keys()


@pytest.mark.slow
def test_workers_of_a_killed_runner_stop_and_two_runners_share_the_work(tmp_path):
    write_suite(tmp_path, set=("train.epochs=6", *SETTINGS[1:]), seeds=(0, 1))
    runner = start(tmp_path)
    (worker,) = wait_for(lambda: claimed(tmp_path), "claim")
    runner.kill()
    runner.wait()
    wait_for(lambda: not psutil.pid_exists(worker), "end of the orphan", 90)
    one, other = start(tmp_path), start(tmp_path)
    assert (one.wait(900), other.wait(900)) == (1, 1)
    assert_whole(tmp_path, 4)  # no one trained what the other one had


@posix
@pytest.mark.slow
def test_ctrl_c_saves_what_was_trained_and_the_same_command_goes_on(tmp_path):
    write_suite(tmp_path, [ROWS[0], ROWS[2]], set=("train.epochs=60", *SETTINGS[1:]))
    runner = start(tmp_path)
    run = wait_for(lambda: next(iter((tmp_path / "runs").glob("*/metrics.jsonl")), None), "metrics").parent
    wait_for(lambda: len(steps(run)) > 1, "step")
    os.killpg(runner.pid, signal.SIGINT)
    assert runner.wait(120) == 1
    assert "interrupted. Repeat the command" in (tmp_path / "output.txt").read_text()
    assert "Traceback" not in (tmp_path / "output.txt").read_text()
    assert claimed(tmp_path) == []
    assert json.loads((run / "record.json").read_text())["status"] == "interrupted"
    assert not finished(tmp_path)
    assert start(tmp_path).wait(900) == 0
    assert_whole(tmp_path, 2)
    assert starts(tmp_path)[run.name] == 2


@pytest.mark.slow
def test_two_processes_go_on_after_kill_9(tmp_path):
    """That two ranks are one process is tested in core."""
    rows = [("infonce", "infonce"), ("dp", "infonce + 0.1*dp")]
    settings = ("train.epochs=4", "train.checkpoint_every=1", "train.log_every=5")
    write_suite(tmp_path, rows, [("next", "next@10")], recipe="pydoc-bow", set=settings, processes=2)
    runner = start(tmp_path)
    saved = wait_for(lambda: next(iter((tmp_path / "runs").glob("*/checkpoints/*")), None), "checkpoint")
    rank = json.loads((saved.parents[1] / ".pid").read_text())["pid"]
    kill_all(runner)
    runner.wait()
    assert start(tmp_path).wait(900) == 0
    assert not psutil.pid_exists(rank)
    assert {record.hardware.world_size for record in assert_whole(tmp_path, 2).values()} == {2}


def test_an_attempt_of_another_runner_is_no_reason_and_is_waited_for(tmp_path):
    """Another runner writes to the same log: its attempt began while ours was ending."""
    log = tmp_path / "job.log"
    before, ours, after = "\n== 1\nerror: an old one\n", "\n== 2\nerror: ours\nbye\n", "\n== 3 dipole train\n"
    log.write_text(before + ours + after)
    assert engines._reason(1, log, len(before)) == "exit code 1: ours"
    assert engines._reason(-9, log, len(before + ours)) == "killed by signal 9"
    task = EngineTask("a" * 12, "one", ["train", "digits-simclr"])
    with locked(tmp_path / BENCH / "claims", task.hash):
        assert engines.run_worker(task, tmp_path, engines.environment_for(1)) is None
        assert not engines.log_of(task, tmp_path).exists()


@pytest.mark.parametrize("engine", [LocalEngine(jobs=1, gpus=[]), PoolEngine(jobs=1)], ids=["local", "pool"])
def test_a_folder_that_takes_no_log_fails_the_job_and_not_the_suite(tmp_path, engine):
    (tmp_path / BENCH).mkdir()
    (tmp_path / BENCH / "logs").write_text("a file stands here")
    found = list(engine.run([EngineTask("a" * 12, "one", []), EngineTask("b" * 12, "other", [])], tmp_path))
    assert [result.status for result in found] == ["failed", "failed"]
    assert "A file is in the place of a folder" in found[0].message


@pytest.mark.parametrize(("command", "said"), [
    (["bench", "no-such-suite"], "no-such-suite"), (["bench", "demo", "--scale", "huge"], "huge"),
    (["report", "nowhere"], "nowhere"),
    (["report", "nowhere", "-o", "x.pdf"], "give a name ending in .html or .md"),
    (["report", ".", "-o", ""], "-o"), (["report", ".", "-o", ".html"], "-o"),
    (["demo", "-o", "x.pdf"], "give a name ending in .html or .md"),
    (["bench", "tiny.toml"], "dcl"), (["bench", "--effect", "1"], "--effect"),
    (["bench", "--seeds", "2"], "--seeds"),
    (["bench", "demo", "--plan", "--effect", "0"], "--effect"),
    (["bench", "--within", "2"], "--within belongs to --all"),
    (["bench", "demo", "--all"], "--all"), (["bench", "--all", "--within", "0"], "--within"),
    (["results", "add", "x"], "dipole results: error:"),
    (["results", "list", "x", "--to", "y"], "dipole results: error:"),
    (["bench", "lmcl-table5-500k", "--plan", "--scale", "small"], "Add --scale paper."),
    (["show", "infonce", "--expand"], "is none"),
    (["show", "lmcl-tabel5", "--expand"], "'lmcl-table5'"),
])  # fmt: skip
def test_bad_requests_are_one_message(command, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_suite(tmp_path, [("infonce", "infonce"), ("dcl", "dlc")])
    assert main(command) in (1, 2)
    errors = capsys.readouterr().err
    assert said in errors
    assert "error:" in errors
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.toml"]


@pytest.mark.parametrize(("asked", "threads"), [("3", (3, 3)), ("", (processors(), 1)), ("two", (processors(), 1))])
def test_workers_have_their_threads_and_gpus(monkeypatch, tmp_path, asked, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert (LocalEngine(jobs=1, gpus=[]).threads, PoolEngine(jobs=1).threads) == threads
    assert (LocalEngine(jobs=1, threads=5, gpus=[]).threads, PoolEngine(jobs=1, threads=5).threads) == (5, 5)
    two = LocalEngine(gpus=["0", "1"])
    assert (two.slots, two.threads) == (2, 3 if asked == "3" else max(1, processors() // 2))
    with pytest.raises(ConfigError, match="needs 3 GPUs, 2 are visible"):
        list(two.run([EngineTask("h", "big", ["train"], processes=3)], tmp_path))
    environment = engines.environment_for(3, "1")
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["OMP_NUM_THREADS"]) == ("1", "3")
    for visible, found in (("2,GPU-7", ["2", "GPU-7"]), ("", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert engines.visible_gpus() == found


SENTENCES, DIGITS = "pydoc-bow", "digits-simclr"


@pytest.mark.parametrize(("recipe", "setting", "said"), [
    (SENTENCES, "text.senteval=data/senteval", "dipole data get senteval"),
    (SENTENCES, "text.corpus=no.txt", "no corpus at no.txt"),
    (SENTENCES, "text.corpus=wiki3029/wiki3029.jsonl.gz", "`dipole data wiki3029 --help`"),
    (SENTENCES, "text.labelled=no.jsonl", "no labelled documents at no.jsonl"),
    (DIGITS, "vision.data.source=data/cifar10/cifar-10-batches-py", "dipole data get cifar10"),
    (DIGITS, "vision.data.test=gone/test.npz", "no data at gone/test.npz"),
    (DIGITS, "vision.data.source=./images", r"no data at './images'"),
    (DIGITS, "vision.data.source=imagenet", "then add --set vision.data.source=FOLDER"),
    (DIGITS, "vision.data.source=wds:x-{000..002}.tar", "3 of 3 shards are missing"),
])  # fmt: skip
def test_missing_data_is_reported_before_anything_is_made(recipe, setting, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_suite(tmp_path, ROWS[:1], recipe=recipe, set=())
    assert main(["bench", "tiny.toml", "--plan", "--set", setting]) == 1
    assert said in "".join(capsys.readouterr())
    for command in (["bench", "tiny.toml", "--runs", "runs"], ["train", recipe, "--quiet"]):
        assert main([*command, "--set", setting]) == 1
        assert capsys.readouterr().err.count(said) == 1
    assert not list(tmp_path.rglob("config.toml"))
    assert not (tmp_path / "runs").exists()


def test_a_misspelled_metric_is_reported_before_training(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "run_suite", lambda *_: sys.exit(3))
    write_suite(tmp_path, ROWS[:1], [("a", "knn/acuracy"), ("b", "knn/top5"), ("c", "diag/rank")])
    with suppress(SystemExit):
        main(["bench", "tiny.toml"])
    said = capsys.readouterr().err
    assert ("'knn/acuracy'. Did you mean 'knn/accuracy'?" in said, said.count("has the number")) == (True, 1)


@pytest.mark.parametrize(("recipe", "data", "setting"), [
    ("cifar10-simclr", "cifar10", "vision.data.source=data/cifar10/cifar-10-batches-py"),
    ("quick-thoughts", "bookcorpus", "text.corpus=data/bookcorpus"),
])  # fmt: skip
def test_a_set_of_the_hub_without_a_network_names_the_command(recipe, data, setting, tmp_path, capsys, monkeypatch):
    import datasets
    import huggingface_hub

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert main(["train", recipe, "--quiet", "--runs", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"`dipole data get {data}` fetches it" in said
    assert f"--set {setting}" in said
    assert not list(tmp_path.iterdir())


def test_a_run_that_cannot_be_built_leaves_no_folder_and_a_suite_of_one_scale_needs_no_option(tmp_path, capsys):
    assert main(["train", "digits-simclr", "--quiet", "--runs", str(tmp_path), "--set", "train.batch_size=5000"]) == 2
    assert not list(tmp_path.iterdir())
    assert main(["bench", "lmcl-table5-500k", "--plan", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scale"] == "paper"


def test_prints_results_on_stdout_and_progress_on_stderr(tmp_path, monkeypatch, capsys):
    name = "[/x] [bold] of a method that is too long for any column of eighty characters to have room for it"
    columns = [("of the neighbours", "knn/accuracy")]
    write_suite(tmp_path, [(name, "infonce")], columns=columns, recipe="gaussian-classes", set=POINTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(bench, "make_engine", lambda *_, **__: Here())
    command = ["bench", "tiny.toml", "--runs", "the runs", "--jobs", "1"]
    assert main(command) == 0
    done = capsys.readouterr()
    assert re.search(r"\[1/1\] done .*\[/x\] \[bold\]", done.err)
    assert "done  " not in done.out
    assert "neighbours" in done.out
    assert "[/x] [bold]" in done.out
    assert "n = 1" in done.out
    assert not set("\x1b\u2502\u2503") & set(done.out + done.err)
    assert "Report: dipole report 'the runs' -o report.html" in done.out
    assert main([*command, "--plan"]) == 0
    plan = capsys.readouterr().out
    assert "1 finished, 0 to do" in plan
    assert "row [/x] [bold] of a method that is too long for any column of eighty characters to have room" in plan
    assert "\u2026" not in plan
    assert main(command) == 0
    again = capsys.readouterr()
    assert "1 of 1 run is finished already." in again.err
    assert again.out.splitlines()[:3] == done.out.splitlines()[:3]


def test_what_a_demo_says_last_can_be_typed_and_looks_where_it_ran():
    for runs in ("runs", "my runs"):
        lines = [line for line in commands._next(Path(runs)).splitlines() if line.startswith("  dipole ")]
        typed = [shlex.split(line, comments=True) for line in lines]
        assert [words[1] for words in typed] == ["train", "list", "list", "bench"]
        assert ("--runs" in typed[2], "my runs" in typed[2]) == ((runs != "runs",) * 2)
        assert len({line.index("#") for line in lines}) == 1


@pytest.mark.parametrize("width", [80, 60, 132])
def test_twenty_columns_and_long_names_fit_with_every_word(width, monkeypatch, capsys):
    names = [f"a measurement of number {i} (%)" for i in range(20)]
    labels = ["infonce(temperature=0.07, symmetric=true, a_very_long_option=1.0)", "hcl"]
    rows = [(Cell(label), *(Cell(f"{80 + i}.{i:02d}", 80.0 + i, "n = 3 of 5") for i in range(20))) for label in labels]
    monkeypatch.setenv("COLUMNS", str(width))
    bench.print_table(ReportTable("s", "A title", ("method", *names), rows))
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= width
    for i in range(20):
        assert text.count(f"{80 + i}.{i:02d}") == 2
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    # Each block has the names of its rows. All that fits is one block.
    assert text.count("method") == text.count("hcl") > 1
    bench.print_table(ReportTable("s", "T", ("method", "value"), [(Cell("a"), Cell("1", 1.0))]))
    assert capsys.readouterr().out.count("method") == 1
