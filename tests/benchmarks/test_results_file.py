"""Results files: what a report makes of them, how they grow from several machines, and what damages them."""

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dipole.benchmarks import results_file
from dipole.benchmarks.manifest import read_manifests, write_manifest
from dipole.benchmarks.report.write import make_report
from dipole.benchmarks.results_command import add, contents
from dipole.benchmarks.results_file import strangers
from dipole.benchmarks.run import bench as every
from dipole.benchmarks.run.bench import bench
from dipole.benchmarks.suite import read_suite
from dipole.benchmarks.suite_results import gather
from dipole.core.cli import main
from dipole.core.utils.errors import ConfigError, RecordError
from tests.benchmarks.conftest import Here, damaged, suite_text, written
from tests.hostile import ODD, changed, places
from tests.runs import refused
from tests.systems import posix

POINTS = ("train.steps=5", "toy.points=60", "toy.starts=4", "train.batch_size=30", "toy.inits=2")
COLUMNS = [("k-means", "kmeans/accuracy")]
TOY = suite_text([("infonce", "infonce")], COLUMNS, "lmcl-toy", set=POINTS, shared_process=True)


def table4(folder, **more):
    """A published table with claims and values that follow the seed."""
    return folder.table4(lambda row, column, seed: 0.7 + 0.003 * seed + len(row + column) / 500, columns=3, **more)


def seen(places):
    """All that a report shows, but for the time at which it was made."""
    return repr(replace(make_report(places), created=""))


def test_a_report_is_the_same_from_folders_and_from_files(runs_folder, tmp_path):
    table4(runs_folder)
    detection = {"value": 0.5, "source": "by hand", "time": "now"}
    measured = runs_folder.path / f"{2:012x}" / "measured.json"
    measured.write_text(json.dumps({"results": {"detection": detection}}))
    (added,) = add([runs_folder.path], tmp_path / "kept")
    assert added.runs == added.wanted == added.new
    shown = seen(runs_folder.path)
    assert "claim" in shown
    assert shown == seen(added.path) == seen([tmp_path / "kept", runs_folder.path])
    whole = [json.loads(line) for line in added.path.read_text().splitlines()]
    assert {"detection": detection} in [r.get("measured") for r in whole]
    assert added.path.stat().st_size < sum(p.stat().st_size for p in runs_folder.path.rglob("*.json*")) / 2
    # Points of a plane are kept where the suite shows them.
    (runs_folder.path / f"{1:012x}" / "points.json").write_text('{"x": [0, 1.5], "y": [2, 3], "label": [0, 1]}')
    (plain,) = add([runs_folder.path], tmp_path / "plain")
    assert "points" not in plain.path.read_text()
    ((manifest,), _) = read_manifests(runs_folder.path)
    write_manifest(runs_folder.path, manifest.model_copy(update={"show": ["scatter"]}))
    (shown,) = add([runs_folder.path], tmp_path / "shown")
    assert seen(tmp_path / "shown") == seen(runs_folder.path)
    assert "1.5" in shown.path.read_text()


def machines(runs_folder, count=2):
    """Folders of several machines: the same suite, each with seeds of its own, the runs named by row and seed."""
    folders = []
    for number in range(count):
        folder = type(runs_folder)(runs_folder.path.parent / f"machine-{number}")
        folder.count = 100 * number
        folder.suite(
            "two", [("a", "infonce", None), ("b", "dcl", "a")], [("x", "vision")],
            lambda row, _, seed: 0.5 + 0.1 * (row == "b") + 0.01 * seed**2, seeds=(2 * number, 2 * number + 1),
        )  # fmt: skip
        folders.append(folder)
    return folders


def test_seeds_of_two_machines_add_up_in_either_order(runs_folder, tmp_path):
    one, other = (folder.path for folder in machines(runs_folder))
    add([one], tmp_path / "a")
    (second,) = add([other], tmp_path / "a")
    assert (second.runs, second.wanted, second.new) == (8, 8, 4)
    (again,) = add([one, other], tmp_path / "a")
    assert (again.runs, again.new, again.conflicts) == (8, 0, ())
    add([other], tmp_path / "b")
    add([one], tmp_path / "b")
    add([other, one], tmp_path / "c")
    texts = {(tmp_path / name / "two-small.jsonl").read_text() for name in "abc"}
    assert len(texts) == 1
    (suite,) = [s for s in make_report(tmp_path / "a").sections if s.id == "two-small"]
    assert suite.subtitle.endswith("8 of 8 runs finished")
    assert "n = 4" in repr(suite.tables)
    cells = [json.loads(line)["cells"] for line in texts.pop().splitlines() if '"run"' in line]
    assert cells == [[[row, 0, seed]] for row in (0, 1) for seed in range(4)]


def test_another_result_of_a_run_is_named_and_what_was_there_stays(runs_folder, tmp_path, capsys):
    run = runs_folder.suite("one", [("a", "infonce", None)], [("x", "vision")], lambda *_: 0.5).jobs[0].hash
    (added,) = add([runs_folder.path], tmp_path / "kept")
    before = added.path.read_bytes()
    damaged(runs_folder, f"{run}/record.json", results={"linear/accuracy": 0.625})
    command = ["results", "add", str(runs_folder.path), "--to", str(tmp_path / "kept")]
    assert main(command) == 1
    said = capsys.readouterr().out
    assert run in said
    assert "linear/accuracy is 0.5 (Test processor) and 0.625 (Test processor)" in said
    assert added.path.read_bytes() == before
    assert "0.625" in repr(make_report([runs_folder.path, added.path]).sections[-1])  # named among the problems
    assert main([*command, "--replace"]) == 0
    assert results_file.read_results_file(added.path).runs[run].record.results == {"linear/accuracy": 0.625}
    for value, code in ((0.5, 0), (0.75, 1)):  # an added number is taken, and another value of it named
        main(["add", str(runs_folder.path / run), f"AP={value}", "--source", "x"])
        assert main(command) == code
    assert main([*command, "--replace"]) == 0
    assert results_file.read_results_file(added.path).runs[run].whole.results["AP"] == 0.75
    # So is a suite that is another one now.
    ((manifest,), _) = read_manifests(runs_folder.path)
    write_manifest(runs_folder.path, manifest.model_copy(update={"note": "changed", "jobs": manifest.jobs[:2]}))
    (added,) = add([runs_folder.path], tmp_path / "kept")
    assert (added.runs, "note" in added.conflicts[0]) == (3, True)
    (added,) = add([runs_folder.path], tmp_path / "kept", replaces=True)
    assert (added.runs, results_file.read_results_file(added.path).manifest.note) == (2, "changed")
    # Other settings of the same cells: no cell has runs of both.
    runs_folder.suite("one", [("a", "infonce", None)], [("x", "vision")], lambda *_: 0.25, note="changed")
    (added,) = add([runs_folder.path], tmp_path / "kept")
    assert (added.runs, "the settings of its runs" in added.conflicts[0]) == (2, True)


def test_no_line_of_a_file_does_harm(runs_folder, tmp_path):
    """Cut, doubled, swapped or with any value changed: it is read, or refused by its name, and nothing is written."""
    runs_folder.suite("one", [("a", "infonce", None)], [("x", "vision")], lambda *_: 0.5, seeds=(0,))
    (added,) = add([runs_folder.path], tmp_path / "kept")
    lines = added.path.read_text().splitlines()
    number = 0

    def tried(texts):
        added.path.write_text("\n".join(texts) + "\n")
        try:
            found = results_file.read_results_file(added.path)
            assert set(found.runs) <= {job.hash for job in found.manifest.jobs}
        except RecordError as error:
            said, before = str(error), added.path.read_bytes()
            assert str(added.path) in said
            refused(RecordError, None, add, [runs_folder.path], tmp_path / "kept")
            assert added.path.read_bytes() == before
        make_report(tmp_path / "kept")

    for place, line in enumerate(lines):
        others = [*lines[:place], *lines[place + 1 :]]
        for texts in (others, [line], [*lines, line], [*lines[:place], line[: len(line) // 2], *lines[place + 1 :]]):
            tried(texts)
        told = json.loads(line)
        for way in places(told, 3)[:: 3 if place else 1]:
            number += 1
            tried([*lines[:place], json.dumps(changed(told, way, ODD[number % len(ODD)])), *lines[place + 1 :]])


@posix
def test_a_pipe_is_not_waited_for(runs_folder):
    runs_folder.record()
    os.mkfifo(runs_folder.path / "odd.jsonl")
    assert len(make_report(runs_folder.path).sections) >= 1


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[1, 2]\n", b'{"dipole": "results", "schema_version": 9}\n'])
def test_what_is_no_results_file_is_a_problem_of_the_report(runs_folder, tmp_path, content):
    runs_folder.record()
    path = runs_folder.path / "odd.jsonl"
    path.write_bytes(content)
    report = make_report(runs_folder.path)
    problems = report.sections[-1]
    assert (problems.id, report.facts["problems"]) == ("problems", "1")
    assert "odd.jsonl" in repr(problems.tables)
    refused(RecordError, r"odd\.jsonl", results_file.known_runs, [path])


def test_places_that_are_none(tmp_path, runs_folder):
    refused(ConfigError, "no runs folder", make_report, [tmp_path / "none"])
    refused(ConfigError, "dipole results add", results_file.known_runs, [tmp_path / "none"])
    refused(ConfigError, "dipole results add", contents, [tmp_path / "none"])
    runs_folder.suite("empty", [("infonce", "infonce", None)], [("kNN", "vision")], None, seeds=())
    refused(ConfigError, "no suite has finished runs", add, [runs_folder.path], tmp_path / "kept")
    (tmp_path / "file").touch()
    for name in ("file", "kept.jsonl"):
        refused(ConfigError, "give a folder", add, [runs_folder.path], tmp_path / name)
    suite = written(tmp_path, 'name = "mine"')
    refused(RecordError, r"mine\.toml is a suite or a recipe. Give the fold", results_file.read_results_file, suite)


def test_bench_makes_no_run_again_that_is_known(runs_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(every, "make_engine", lambda *_, **__: Here())
    suite, second = written(tmp_path, TOY), tmp_path / "second"
    sized = read_suite(str(suite)).at("small")
    (job,) = sized.jobs()
    runs_folder.count = int(job.hash, 16) - 1  # its name
    runs_folder.record(results={"kmeans/accuracy": 0.5})
    write_manifest(runs_folder.path, sized.manifest([job]))
    assert main(["results", "add", str(runs_folder.path), "--to", str(tmp_path / "kept")]) == 0
    capsys.readouterr()
    known, answer = [tmp_path / "kept"], {}
    assert bench(str(suite), runs=second, jobs=1, known=known, answer=answer) == 0
    assert (answer["done"], answer["skipped"]) == (0, 1)
    assert not [path for path in second.iterdir() if not path.name.startswith(".")]
    assert "n = 1" in capsys.readouterr().out
    assert bench(str(suite), runs=second, jobs=1, seeds=2, known=known, answer=answer) == 0
    assert (answer["done"], answer["skipped"]) == (1, 1)
    (grown,) = add([second], tmp_path / "kept")
    assert (grown.runs, grown.wanted, "n = 2" in capsys.readouterr().out) == (2, 2, True)
    assert bench(str(suite), runs=second, jobs=1, seeds=1, known=known) == 0
    assert len(read_manifests(second)[0][0].jobs) == 2  # what was run of further seeds stays
    # A results file in the folder of runs counts as well.
    third = tmp_path / "third"
    third.mkdir()
    grown.path.rename(third / grown.path.name)
    assert bench(str(suite), runs=third, jobs=1, seeds=2, answer=answer) == 0
    assert (answer["done"], answer["skipped"]) == (0, 2)
    assert "n = 2" in capsys.readouterr().out


@pytest.mark.slow
def test_all_suites_run_from_the_shortest_and_go_on_where_they_were(tmp_path, monkeypatch, capsys):
    for name, steps in (("a-long", 40), ("b-short", 5)):
        written(tmp_path, TOY.replace('"tiny"', f'"{name}"').replace("train.steps=5", f"train.steps={steps}"), name)
    paths = {name: tmp_path / f"{name}.toml" for name in ("a-long", "b-short")}
    monkeypatch.setattr(every, "suites", lambda: paths)  # what is shipped takes days
    monkeypatch.setattr(every, "read_suite", lambda name: read_suite(paths[name]))
    answer = {}
    assert every.bench_all(runs=tmp_path / "runs", jobs=1, answer=answer) == 0
    assert [(each["suite"], each["done"]) for each in answer["suites"]] == [("b-short", 1), ("a-long", 1)]
    assert every.bench_all(runs=tmp_path / "runs", jobs=1, answer=answer) == 0
    assert answer["suites"] == []
    assert every.bench_all(runs=tmp_path / "other", jobs=1, within=1e-9, answer=answer) == 0
    assert answer["suites"] == []
    assert "left out" in capsys.readouterr().err


def test_what_comes_with_dipole_goes_by_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "lmcl-figure2", "--known", "shipped"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Report: dipole report runs shipped -o report.html"


def test_what_cannot_be_read_or_is_unfinished_is_left_out_and_named(runs_folder, tmp_path):
    manifest = table4(runs_folder)
    (runs_folder.path / f"{1:012x}" / "record.json").write_text('{"schema_version": 1, "hash": ')
    damaged(runs_folder, f"{2:012x}/record.json", status="failed", error="no memory")
    (added,) = add([runs_folder.path], tmp_path / "kept")
    assert added.runs == added.wanted - 2
    (said,) = added.left_out
    assert f"run {1:012x} of lmcl-table4-small cannot be read" in said
    assert main(["results", "add", str(runs_folder.path), "--to", str(tmp_path / "kept")]) == 1
    found = results_file.read_results_file(added.path)
    assert len(found.manifest.jobs) == len(manifest.jobs)  # what is missing is asked for
    assert not {f"{1:012x}", f"{2:012x}"} & found.runs.keys()


def test_a_seed_of_other_data_is_not_mixed_in(runs_folder, tmp_path, capsys):
    table4(runs_folder)
    later = {path: json.loads(path.read_text()) for path in runs_folder.path.glob("*/record.json")}
    later = {path: record for path, record in later.items() if record["seed"] == 2}
    for path in later:
        path.unlink()
    (first,) = add([runs_folder.path], tmp_path / "kept")
    before = results_file.read_results_file(first.path).runs
    assert {run.record.seed for run in before.values()} == {0, 1}
    for path, record in later.items():
        path.write_text(json.dumps(record | {"data": record["data"] | {"fingerprint": "another"}}))
    assert main(["results", "add", str(runs_folder.path), "--to", str(tmp_path / "kept"), "--replace"]) == 1
    assert "was measured on other data (fingerprint another) than the other runs" in capsys.readouterr().out
    assert results_file.read_results_file(first.path).runs == before
    for path, record in later.items():
        path.write_text(json.dumps(record))
    (whole,) = add([runs_folder.path], tmp_path / "kept")
    assert (whole.new, whole.left_out) == (len(later), ())


def test_a_report_names_runs_of_other_data_and_of_other_results(runs_folder, tmp_path):
    table4(runs_folder, seeds=(0, 1, 2))
    add([runs_folder.path], tmp_path / "kept")
    damaged(runs_folder, f"{1:012x}/record.json", results={"text": 0.1})
    for order in ([runs_folder.path, tmp_path / "kept"], [tmp_path / "kept", runs_folder.path]):
        said = seen(order)
        assert "other results than the same run elsewhere" in said.partition("Results that contradict each other")[2]
        assert "Not readable" not in said
        ((left,),) = (each.left_out for each in add(order, tmp_path / f"both {order[0].name}"))
        assert "other results than the same run elsewhere" in left
    add([runs_folder.path], tmp_path / "changed")
    said = [str(each) for each in gather([tmp_path / "kept", tmp_path / "changed"]).problems]
    assert sum("other results" in each for each in said) == 1
    damaged(runs_folder, f"{1:012x}/record.json", data={"name": "none", "fingerprint": "another"})
    assert "was measured on other data (fingerprint another)" in seen(runs_folder.path)
    (added,) = add([runs_folder.path], tmp_path / "of one data set")
    assert "was measured on other data (fingerprint another)" in added.left_out[0]
    assert added.runs == added.wanted - 1


def test_data_that_follow_the_seed_are_no_strangers():
    def run(seed, print_, name="x", imbalance=1.0):
        data = {"name": "digits", "sizes": {"test": 9}, "fingerprint": print_}
        config = {"vision": {"data": {"size": imbalance}}}
        return SimpleNamespace(domain="vision", data=data, seed=seed, hash=f"{name}{seed}{print_}", config=config)

    assert strangers([run(0, "a"), run(1, "b")], [run(2, "c")]) == {}
    assert list(strangers([run(0, "a"), run(1, "b")], [run(1, "c")])) == ["x1c"]
    assert list(strangers([run(0, "a"), run(1, "a")], [run(2, "c")])) == ["x2c"]
    assert strangers([run(0, "a")], [run(2, "c")]) == {}
    assert list(strangers([run(0, "a"), run(0, "a", "y"), run(0, "c")])) == ["x0c"]
    assert strangers([run(0, "a"), run(0, "a", "y"), run(0, "c", imbalance=20.0)]) == {}
