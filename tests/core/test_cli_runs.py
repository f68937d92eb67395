"""Commands about runs: list, compare and rm. Shell completion. JSON answers, and plain text for pipes."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import blobs_domain
import pytest
from filelock import FileLock
from runs import change, dipole, done, quiet, refused, told
from scipy.stats import nct, t, ttest_ind, ttest_rel

from dipole.core.cli import app as cli
from dipole.core.cli.commands import completion
from dipole.core.train.domains import temporary_domain
from dipole.core.utils.process import OWNER, describe_self
from tests.systems import links, posix

PRINTS = "from dipole.core.utils.progress import console; console().print('[bold red]plan[/]')"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two objectives, three seeds each."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "blobs.toml").write_text(blobs_domain.RECIPE)
    with temporary_domain(blobs_domain.BLOBS):
        for objective in ("infonce", "dcl"):
            for seed in range(3):
                quiet(folder / "blobs.toml", f"seed={seed}", f"objective={objective}", runs=folder / "runs")
    return folder / "runs"


@pytest.fixture
def trained(blobs, runs):
    """A copy of the runs in the working directory, by objective and seed."""
    shutil.copytree(runs, "runs")
    records = {path.parent: json.loads(path.read_text()) for path in Path("runs").glob("*/record.json")}
    return {(record["objective"], record["seed"]): folder for folder, record in records.items()}


def test_compare_pairs_seeds_corrects_and_leaves_baselines_out(trained, capsys):
    """Large common effects of the seed do not hide a difference, and one significant number in four may not stay so."""
    values = {
        "near": ([0.50, 0.70, 0.90], [0.520, 0.721, 0.919]), "noisy": ([0.50, 0.70, 0.90], [0.90, 0.50, 0.70]),
        "weak": ([0.50, 0.52, 0.54], [0.60, 0.63, 0.60]), "same": ([0.2, 0.4, 0.6], [0.2, 0.4, 0.6]),
        "untrained/near": ([0.1, 0.3, 0.5], [0.1, 0.3, 0.5]), "odd": ([None] * 3, [0.5] * 3),
    }  # fmt: skip
    for (objective, seed), folder in trained.items():
        change(folder, results={name: both[objective == "dcl"][seed] for name, both in values.items()})
    first, second = trained["infonce", 0], trained["dcl", 1]
    config = json.loads((trained["infonce", 2] / "record.json").read_text())["config"]
    change(trained["infonce", 2], config=config | {"device": "cuda:1"})  # which determines no result
    answer = told(capsys, "compare", first, second.name[:8])
    assert answer["settings"] == {"objective": ["infonce", "dcl"]}
    for name, group in zip(("infonce", "dcl"), answer["runs"], strict=True):
        assert set(group) == {trained[name, seed].name for seed in range(3)}
    assert [answer[key] for key in ("level", "correction", "not_finite")] == [0.05, "Holm", ["odd"]]
    assert answer["baselines"] == {"untrained/near": [pytest.approx(0.3)] * 2}
    found = {each["name"]: each for each in answer["numbers"]}
    assert set(found) == {"near", "noisy", "weak", "same"}
    tests = {name: ttest_rel(values[name][1], values[name][0]) for name in ("near", "noisy", "weak")}
    ps = [*(float(test.pvalue) for test in tests.values()), 1.0]
    # Holm (1979), by its definition: the largest of (m - j) p_j over all smaller p values.
    expected = [min(1.0, max(q * sum(each >= q for each in ps) for q in ps if q <= p)) for p in ps]
    for (name, test), p in zip(tests.items(), expected, strict=False):
        interval = test.confidence_interval(0.95)
        assert found[name]["interval"] == pytest.approx([interval.low, interval.high])
        assert (found[name]["p"], found[name]["p_holm"]) == (pytest.approx(test.pvalue), pytest.approx(p))
        assert found[name]["test"] == "paired t-test on 3 common seeds"
        error = (interval.high - interval.low) / 2 / t.isf(0.025, 2)
        shift = found[name]["detectable"] / error
        assert nct.sf(t.isf(0.05 / 2 / 4, 2), 2, shift) == pytest.approx(0.8, abs=1e-3)
    verdicts = {name: each["verdict"] for name, each in found.items()}
    assert verdicts == {"near": "second is higher", "noisy": "undecided", "weak": "undecided", "same": "equal"}
    assert tests["weak"].pvalue < 0.05
    assert [found["same"][key] for key in ("difference", "interval", "p", "detectable")] == [0, None, 1, None]
    out = dipole(capsys, "compare", second, first)[1]
    words = r"paired t-test on 3 common seeds, two-sided.\nVerdicts are at level 0.05 after Holm's"
    for pattern in ("first is higher", "finite: odd", words, r"baseline +first +second\nuntrained/near +0.3 +0.3"):
        assert re.search(pattern, out)
    assert re.search(r"objective\s+dcl\s+infonce", out)
    assert "different data" not in out
    change(first, data={"fingerprint": "0"})  # as after an image was added to its folder
    assert "different data" in dipole(capsys, "compare", second, first)[1]


def test_compare_without_common_seeds_names_its_test(trained, capsys):
    values = {"infonce": [0.50, 0.52, 0.54], "dcl": [0.60, 0.63, 0.60]}
    for (objective, seed), folder in trained.items():
        change(folder, results={"a": values[objective][seed]}, seed=seed + 10 * (objective == "dcl"))
    test = ttest_ind(values["dcl"], values["infonce"], equal_var=False)
    for seed in (None, 0, 2):  # two common seeds of three decide less than all seeds
        if seed is not None:
            change(trained["dcl", seed], seed=seed)
        (found,) = told(capsys, "compare", trained["infonce", 0], trained["dcl", 1])["numbers"]
        assert found["test"] == "Welch's t-test on 3 and 3 seeds"
        assert (found["p"], found["verdict"]) == (pytest.approx(test.pvalue), "second is higher")
        assert (found["first"], found["second"]) == (pytest.approx(0.52), pytest.approx(0.61))


@pytest.mark.parametrize("text", [
    "\x1b[31mred\x1b[0m", "over\rwritten", "two\nlines", "\x9b2J", "\u202egnp", "\x07\x08", "\u061cmark",
    "\ufff9\U000e0041",
])  # fmt: skip
def test_control_characters_of_received_records_are_escapes(text, trained, capsys):
    first, second = trained["infonce", 0], trained["dcl", 0]
    config = json.loads((second / "record.json").read_text())["config"]
    for folder, objective in ((first, "infonce"), (second, f"dcl{text}")):
        values = {"name": text, "objective": objective, "results": {"accuracy": 0.5, f"accuracy{text}": 0.5}}
        change(folder, **values, config=config | {"objective": objective, text: text})
    for path in set(trained.values()) - {first, second}:
        shutil.rmtree(path)
    commands = ["list", "runs"], ["compare", first, second], ["add", second, f"note{text}=0.5"], ["eval", second]
    commands += (["train", second / "config.toml", "--print-config", "--set", f"name={text}"],)
    shown = "".join("".join(dipole(capsys, *words)[1:]) for words in commands)
    hidden = [*range(9), *range(11, 32), *range(127, 160), 0x061C, 0x202E, 0xFFF9, 0xE0041]
    assert not set(shown) & set(map(chr, hidden))
    assert text not in shown
    assert text.encode("unicode_escape").decode() in shown


def test_compare_needs_two_seeds_and_finished_runs(trained, capsys):
    for seed in (1, 2):
        shutil.rmtree(trained["dcl", seed])
    first, second = trained["infonce", 0], trained["dcl", 0]
    said = refused(capsys, "compare", first, first.name[:8])
    assert f"both are the run {first}. Give two different runs" in said
    assert re.search("one seed.*A verdict needs two seeds of each", done(capsys, "compare", first, second), re.DOTALL)
    out = done(capsys, "compare", first, trained["infonce", 1])
    assert ("Only the seed differs" in out, "two seeds of one setting" in out) == (True, True)
    again = shutil.copytree(first, first.parent / "again" / first.name)
    out_of_copy = done(capsys, "compare", first, again)
    assert ("Settings and seed are the same" in out_of_copy, "trained twice" in out_of_copy) == (True, True)
    shutil.copytree(trained["infonce", 2], again.parent / trained["infonce", 2].name)
    assert len(re.findall(r" seeds 0, 2$", done(capsys, "compare", first, again), re.MULTILINE)) == 2
    for folder in (first, again):
        done(capsys, "add", folder, "AP=0.5", "--source", "x")
    assert re.search(r"\nAP +0\.5", done(capsys, "compare", first, again))
    shutil.rmtree(again.parent)
    # The third seed belongs to neither.
    assert re.search(r"^first .* seeds 0\nsecond .* seeds 1$", out, re.MULTILINE)
    change(second, status="failed")
    assert "is failed. Only finished runs can be compared" in refused(capsys, "compare", first, second)


def test_rm_asks_and_removes_by_hash_or_by_any_path(trained, capsys, monkeypatch):
    folder, *others = trained.values()
    assert "not interactive: add --yes" in refused(capsys, "rm", folder)
    assert folder.is_dir()
    again = Path("..") / Path.cwd().name / folder
    assert done(capsys, "rm", folder, again, folder.name[:9], "--yes") == f"removed {folder}\n"
    assert not folder.exists()
    answer = told(capsys, "rm", others[0].name[:8], others[1], others[1], "--yes")
    assert answer == {"removed": [str(others[0]), str(others[1])], "failed": []}
    assert not list(Path("runs").glob("**/*removed*"))
    assert "no run" in refused(capsys, "rm", folder.name, "--yes")
    monkeypatch.chdir(others[2])
    assert "got ''" in refused(capsys, "rm", "", "--yes", "--runs", "..")  # a variable without a value
    assert done(capsys, "rm", ".", "--yes", "--runs", "..") == f"removed ../{others[2].name}\n"
    monkeypatch.chdir("../..")
    assert {path.parent for path in Path("runs").glob("*/record.json")} == set(others[3:])


@posix
def test_the_rest_of_a_failed_rm_is_no_run(trained, capsys, monkeypatch):
    first, second = trained["infonce", 0], trained["infonce", 1]
    unlink = os.unlink

    def refuse(path: Any, **options: Any) -> None:
        # Modes are no hindrance to the root user of a container.
        if Path(str(path)).name == "metrics.jsonl" and (options.get("dir_fd") or ".removed-" in str(path)):
            raise PermissionError(1, "Operation not permitted", str(path))
        unlink(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        code, out, err = dipole(capsys, "rm", first, second, "--yes", "--json")
    left = first.with_name(f".removed-{first.name}")
    answer = json.loads(out)
    assert (code, answer["removed"], [each["run"] for each in answer["failed"]]) == (1, [], [str(first), str(second)])
    for words in (answer["failed"][0]["message"], f"in {left}, which commands ignore. Remove that folder later."):
        assert words in err
    assert left.is_dir()
    listed = {each["name"] for each in told(capsys, "list", "runs")["runs"]}
    assert listed == {folder.name for folder in trained.values()} - {first.name, second.name}
    assert "is hidden, as what `dipole rm` left" in refused(capsys, "rm", left, "--yes")
    # A seed that is half removed is none: one of infonce is left.
    answer = told(capsys, "compare", trained["infonce", 2], trained["dcl", 0])
    assert [len(group) for group in answer["runs"]] == [1, 3]


def test_list_runs_has_a_line_for_each_run(trained, capsys):
    bare, alone, damaged, running = *(trained["dcl", seed] for seed in range(3)), trained["infonce", 0]
    killed = trained["infonce", 1]
    (bare / "record.json").unlink()
    (alone / "config.toml").unlink()
    (damaged / "record.json").write_text('{"schema_version": 1, "hash": 3}')
    change(running, status="running", steps=0)
    with (running / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 12345}\n{"step": 99')
    change(killed, status="running")
    (killed / OWNER).write_text(json.dumps(json.loads(describe_self()) | {"boot": "an earlier one"}))
    found = {each["name"]: each for each in told(capsys, "list", "runs")["runs"]}
    states = {bare: "no record", alone: "done", damaged: "unreadable", running: "running", killed: "interrupted"}
    assert {path: found[path.name]["status"] for path in states} == states
    assert (found[bare.name]["objective"], found[bare.name]["seed"], found[running.name]["steps"]) == ("dcl", 0, 12345)
    assert "does not follow schema 1" in found[damaged.name]["problem"]
    lines = done(capsys, "list", "runs").splitlines()
    assert f"{killed.name}  interrupted  blobs  seed 1  step 10  infonce" in "\n".join(lines)
    assert len(lines) == 1 + len(trained)
    assert len({line.index("  seed ") for line in lines[1:] if "unreadable" not in line}) == 1
    # `rm` removes every listed run.
    done(capsys, "rm", bare.name, alone, damaged, "--yes")
    Path("afile").touch()
    for folder, words in (("afile", "it is a file"), ("nowhere", "no such folder")):
        assert f"--runs {folder}: {words}. Give a folder that" in dipole(capsys, "list", "runs", "--runs", folder)[2]


@links
def test_rm_touches_nothing_outside_the_folder_of_runs(trained, capsys):
    inside = trained["infonce", 0]
    outside = Path("thesis") / inside.name
    shutil.copytree(inside, outside)
    link = Path("runs") / "link"
    link.symlink_to(outside.resolve(), target_is_directory=True)
    messages = {outside: "is not in runs/. Give its folder of runs with --runs", link: f"link to {outside.resolve()}"}
    for name, words in (messages | {".": "is no run folder: it has no config.toml and no record.json"}).items():
        assert words in refused(capsys, "rm", name, "--yes")
    # One that may not be removed keeps the others as well.
    refused(capsys, "rm", inside, outside, "--yes")
    assert (inside.is_dir(), outside.is_dir()) == (True, True)


def test_rm_refuses_a_run_that_is_trained(trained, capsys):
    folder = trained["infonce", 0]
    with FileLock(folder / ".lock"):
        assert "is being trained" in refused(capsys, "rm", folder, "--yes", "--force")
    # Without locks, the living process says that it trains.
    (folder / OWNER).write_text(describe_self())
    change(folder, status="running")
    assert f"process {os.getpid()}" in refused(capsys, "rm", folder, "--yes", "--force")
    assert folder.is_dir()
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    (folder / OWNER).write_text(json.dumps(json.loads(describe_self()) | {"pid": gone.pid}))
    code, _, err = dipole(capsys, "rm", folder, "--yes")
    assert (code, "its process was killed" in err, folder.exists()) == (0, True, False)


@pytest.mark.parametrize(
    ("owner", "host"),
    [(json.loads(describe_self()) | {"host": "elsewhere", "pid": 7}, "elsewhere"), (7, "unknown"), ("", "unknown")],
)
def test_rm_of_a_run_of_another_host_needs_force(trained, capsys, owner, host):
    folder = trained["infonce", 0]
    change(folder, status="running")
    (folder / OWNER).write_text(json.dumps(owner) if owner else "")
    err = refused(capsys, "rm", folder, "--yes")
    assert "--force" in err
    assert (host if owner != 7 else "unknown host") in err
    done(capsys, "rm", folder, "--yes", "--force")
    assert not folder.exists()


def test_bash_completes_commands_options_names_and_files(tmp_path, monkeypatch, capsys):
    pytest.importorskip("shtab")
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    monkeypatch.chdir(tmp_path)
    for name in ("0123abc", "0ffe"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "mine.toml").write_text("")
    ask = (
        "COMP_WORDS=(dipole {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=(); "
        'COMP_LINE="${{COMP_WORDS[*]}}"; "$(complete -p dipole | sed -E "s/.*-F ([^ ]+).*/\\1/")"; '
        'echo "${{COMPREPLY[@]}}"'
    )
    wanted = {
        "com": "compare completion", "rm --y": "--yes", "completion z": "zsh", "train digits-simc": "digits-simclr",
        "show sims": "simsiam", "train mi": "mine.toml", "show infon": "infonce", "bench lmcl-table1": "lmcl-table1",
        "data get cifar10": "cifar10 cifar100", "rm r": "runs", "report runs -o mi": "mine.toml", "rm 01": "0123abc",
        "rm 0123abc 0f": "0ffe", "report sh": "shipped", "bench demo --known sh": "shipped", "data wiki": "wiki3029",
        "train mine.toml --resume a": "auto", "data get wiki": "", "compare 0123abc 0f": "0ffe",
    }  # fmt: skip
    script = "\n".join([done(capsys, "completion", "bash"), *(ask.format(words=words) for words in wanted)])
    found = subprocess.run([bash, "--norc", "-c", script], capture_output=True, text=True, check=True)
    assert [" ".join(sorted(line.split())) for line in found.stdout.split("\n")[:-1]] == list(wanted.values())


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_scripts_of_all_shells_name_every_command(shell, tmp_path, capsys):
    pytest.importorskip("shtab")
    answer = told(capsys, "completion", shell)
    assert answer["shell"] == shell
    assert all(name in answer["script"] for name in cli.names())
    if (found := shutil.which(shell)) is not None:
        script = tmp_path / "script"
        script.write_text(answer["script"])
        load = f'autoload -Uz compinit; compinit -u -D; eval "$(<{script})"' if shell == "zsh" else f"source {script}"
        read = subprocess.run([found, "-f", "-c", load], capture_output=True, text=True, check=False)
        assert (read.returncode, read.stderr) == (0, "")


def test_a_broken_command_of_a_package_breaks_no_other_completion(monkeypatch, capsys):
    pytest.importorskip("shtab")

    def half(parser: argparse.ArgumentParser) -> Any:
        parser.add_argument("--begun")
        raise RuntimeError("no model server")

    listed = cli.listed_commands()
    monkeypatch.setattr(cli, "listed_commands", lambda: [*listed, {"name": "odd", "summary": "", "package": "theirs"}])
    find = cli._find
    monkeypatch.setattr(cli, "_find", lambda name: half if name == "odd" else find(name))
    out = done(capsys, "completion", "bash")
    assert ("--begun" in out, "digits-simclr" in out) == (False, True)
    monkeypatch.setitem(sys.modules, "shtab", None)
    (line,) = refused(capsys, "completion", "bash").splitlines()
    assert re.search(r"pip install.*completion", line)


def test_long_settings_are_shortened(trained, capsys):
    for seed in range(3):
        config = json.loads((trained["dcl", seed] / "record.json").read_text())["config"]
        change(trained["dcl", seed], config=config | {"description": "", "text": {"corpus": "a" * 500}})
    words = ("compare", trained["infonce", 0], trained["dcl", 0])
    assert max(map(len, done(capsys, *words).splitlines())) < 130
    assert "a" * 500 in json.dumps(told(capsys, *words)["settings"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("list",), ("list", "runs"), ("show", "infonce"), ("show", "demo"), ("show", "demo", "--expand"), ("doctor",),
        ("theory", "--list"), ("data", "list"), ("check", "infonce", "--only", "determinism"), ("bench",),
        ("bench", "demo", "--plan"), ("report", "runs"),
        ("train", "blobs.toml"), ("train", "blobs.toml", "--seed", "9"), ("eval", "RUN"),
        ("export", "RUN", "--to", "text", "--out", "out"), ("add", "RUN", "AP=0.5", "--source", "x"),
        ("compare", "RUN", "OTHER"), ("rm", "RUN", "--yes"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_stdout_is_json_alone(arguments, trained, capsys):
    places = {"RUN": trained["infonce", 0], "OTHER": trained["dcl", 1]}
    out = done(capsys, *(places.get(each, each) for each in arguments), "--json")
    assert json.loads(out) not in (None, "")


def escapes(**environment: str) -> str:
    """Return both streams of our console on a terminal."""
    pty = pytest.importorskip("pty")  # Windows has none
    leader, follower = pty.openpty()
    given = {**{k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "CI")}, "TERM": "xterm", **environment}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), follower)
    subprocess.run([sys.executable, "-c", PRINTS], **streams, env=given, check=True)
    with os.fdopen(leader, "rb", buffering=0) as stream, os.fdopen(follower):
        return stream.read(65536).decode(errors="replace")


def test_a_terminal_without_colour_and_a_pipe_get_plain_text():
    assert "\x1b" in escapes()
    codes = re.findall(r"\x1b\[[0-9;]*m", escapes(NO_COLOR="1"))
    assert not [code for code in codes if re.search(r"\[(?:.*;)?(?:3\d|4\d|9\d)", code)]
    assert "\x1b" not in escapes(TERM="dumb")
    environment = {**os.environ, "TERM": "xterm-256color", "FORCE_COLOR": ""}
    piped = subprocess.run([sys.executable, "-c", PRINTS], capture_output=True, text=True, check=True, env=environment)
    assert piped.stdout == "plan\n"
