"""The commands as a user types them: output, exit codes, one message instead of a traceback."""

import json
import re
import shlex
import signal
import subprocess
import sys
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from runs import assert_same_bits, change, dipole, done, refused, told, wait_for

from dipole.benchmarks.manifest import read_records
from dipole.core.cli import app as cli
from dipole.core.cli.app import broken_plugins
from dipole.core.cli.commands import doctor
from dipole.core.record import read_record
from dipole.core.train.data_sets import fetched
from dipole.core.train.domains import Domain, temporary_domain
from dipole.core.train.metrics import read_metrics
from dipole.core.utils.extras import install_line
from tests.ranks import Python
from tests.systems import POSIX

HELP = """
import io, json, sys, time
from contextlib import redirect_stdout
begin = time.process_time()
from dipole.core.cli import main
for command in json.loads(sys.argv[1]):
    with redirect_stdout(io.StringIO()) as said:
        code = main([*command, "--help"])
    loaded = sorted({"torch", "numpy", "sklearn"} & set(sys.modules))
    print(json.dumps([command, code, said.getvalue(), time.process_time() - begin, loaded]))
    begin = time.process_time()
"""
WRITERS = ["embed r x", "export r --to onnx", "report r", "demo", "data get cifar10", "new a"]


def test_help_is_quick_and_loads_no_torch():
    commands = json.dumps([[], *([name] for name in cli.names())])
    done = subprocess.run([sys.executable, "-c", HELP, commands], capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        command, code, usage, seconds, loaded = json.loads(line)
        assert (code, loaded, usage[:13]) == (0, [], "usage: dipole"), command
        assert seconds < 0.6, command  # 0.3 on an idle machine


def test_the_program_is_a_module_too():
    done = subprocess.run([sys.executable, "-m", "dipole", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"dipole {metadata.version('dipole')}\n"


def test_train_eval_export(blobs, capsys):
    command = ("train", blobs, "--set", "train.evaluate_every=5", "objective=infonce+dp", "--seed", 3)
    code, out, err = dipole(capsys, *command)
    assert code == 0
    (folder,) = Path("runs").iterdir()
    record = read_record(folder / "record.json")
    assert all(words in err for words in ("negatives per anchor: 30", "step 5: mean/accuracy"))
    for words in (f"run        {folder}", f"mean/accuracy  {record.results['mean/accuracy']:.4f}"):
        assert words in out
    assert (record.seed, record.objective) == (3, "infonce + 0.1*dp")
    code, out, err = dipole(capsys, *command)
    assert (code, err, "--overwrite runs it again" in out) == (0, "", True)
    answer = told(capsys, "eval", folder.name[:4])
    assert answer == {"run": str(folder), "agrees": True, "results": record.results, "notes": []}
    done(capsys, "eval", folder)
    again = read_record(folder / "record.json")
    assert [(each.results, each.agrees) for each in again.evaluations] == [(record.results, True)] * 2
    assert again.model_copy(update={"evaluations": []}) == record
    assert done(capsys, "export", folder, "--to", "text", "--out", "exported") == "exported\n"
    assert "infonce + 0.1*dp" in Path("exported/weights.txt").read_text()
    refused(capsys, "export", folder, "--to", "text", "--out", "exported")
    assert "Did you mean 'text'? Formats: text." in refused(capsys, "export", folder, "--to", "test")


def test_eval_of_a_run_that_changed_or_broke(one_run, capsys):
    change(one_run, results=read_record(one_run / "record.json").results | {"mean/accuracy": 0.123})
    (one_run / "odd.txt").write_bytes(b"\xff\xfe")
    assert told(capsys, "eval", one_run)["agrees"] is False
    assert "0.1230" in dipole(capsys, "eval", one_run)[1]
    model = one_run / "model" / "module.safetensors"
    model.write_bytes(model.read_bytes()[:-10])
    assert "cannot be loaded" in refused(capsys, "eval", one_run, code=1)
    model.unlink()
    assert "is missing" in refused(capsys, "eval", one_run, code=1)
    change(one_run, status="failed")
    assert "is failed; finish it with: dipole train" in refused(capsys, "eval", one_run, code=1)


def test_numbers_of_another_program_stand_beside_the_run_s_own(one_run, capsys):
    folder = one_run
    before = (folder / "record.json").read_bytes()
    done(capsys, "add", folder.name[:6], "voc/AP50=0.8", "voc/AP=0.5", "--source", "detectron2 0.6")
    assert "detectron2 0.6" in done(capsys, "add", folder, "voc/AP=0.52", "--source", "again")
    assert (folder / "record.json").read_bytes() == before
    results = read_records(Path("runs")).records[folder.name].results
    assert results.items() >= {"voc/AP50": 0.8, "voc/AP": 0.52}.items()
    assert "mean/accuracy" in results
    messages = {"AP50": "not NAME=VALUE", "AP50=nan": "finite", "=1": "not NAME=VALUE"}
    for wrong, message in (messages | {"mean/accuracy=1": "measured by the run itself"}).items():
        assert message in refused(capsys, "add", folder, wrong, "--source", "x")
    (folder / "measured.json").write_text("{")
    found = read_records(Path("runs"))
    assert found.records[folder.name].results.keys() >= {"mean/accuracy"}
    assert [problem.path.name for problem in found.problems] == ["measured.json"]
    assert "not what `dipole add` writes" in refused(capsys, "add", folder, "AP=1", "--source", "x", code=1)


def test_print_config_shows_origins_and_is_itself_a_recipe(blobs, capsys):
    out = done(capsys, "train", blobs, "--print-config", "--set", "blobs.noise=0.5")
    for line in ("noise = 0.5  # --set", "batch_size = 16  # recipe", 'optimizer = "adam"  # default'):
        assert line in out
    Path("again.toml").write_text(out)
    again = dipole(capsys, "train", "again.toml", "--print-config")[1]
    assert again.splitlines()[0] == out.splitlines()[0]
    assert not Path("runs").exists()


def test_list_names_what_exists(blobs, capsys):
    listed = told(capsys, "list")
    names = {kind: {each["name"] for each in entries} for kind, entries in listed.items()}
    assert {"infonce", "dcl", "hcl", "cacr"} <= names["objectives"]
    assert {"dp", "cllr"} <= names["regularizers"]
    assert {"vision", "text", "rl"} <= names["domains"]
    assert {"lmcl-table4", "cross-domain", "demo"} <= names["suites"]
    assert all(each["summary"] for entries in listed.values() for each in entries)
    out = done(capsys, "list", "regularizers")
    assert (out.startswith("regularizers:\n"), "infonce" in out) == (True, False)


def test_show_explains_an_objective_a_table_and_a_recipe(blobs, capsys):
    Path("dp").touch()  # a file of the same name
    out = done(capsys, "show", "dp")
    for text in ("D_ij", "LMCL Eqs. 6-10", "delta_pos", "0.5", "weight:   0.1 when none is written", "cost:"):
        assert text in out
    (option,) = [each for each in told(capsys, "show", "infonce")["options"] if each["name"] == "temperature"]
    assert option["default"] == 0.5
    points = {"name": "points", "type": "int", "default": "64", "range": ">= 8", "help": "number of points"}
    assert told(capsys, "show", "blobs")["settings"][0] == points
    assert "milestones" in done(capsys, "show", "train")
    # A recipe and a suite may share a name: both are shown.
    suite, recipe = told(capsys, "show", "lmcl-table5")
    assert (suite["kind"], recipe["kind"]) == ("suite", "recipe")
    assert told(capsys, "show", suite["path"])["text"] == suite["text"]
    assert done(capsys, "show", blobs) == blobs.read_text() + "\n"
    assert "[scale.paper]" in done(capsys, "show", "lmcl-table4")


def test_doctor_names_problems_and_fixes(blobs, capsys, monkeypatch):
    rl = Domain("rl", "agents", "absent_package:Adapter", "rl", {"simulator": "absent_package:probe"}, "dipole")
    for name, value in (("DIPOLE_DATA", "nowhere"), ("HF_HUB_OFFLINE", "0"), ("HF_DATASETS_OFFLINE", "1")):
        monkeypatch.setenv(name, value)
    with temporary_domain(rl):
        findings = {each["name"]: each for each in told(capsys, "doctor")}
    assert findings["hub cache"]["detail"].endswith(" (offline by HF_DATASETS_OFFLINE)")
    assert (findings["torch"]["state"], findings["runs folder"]["state"]) == ("ok", "ok")
    assert findings["data folder"]["fix"] == "Correct or unset DIPOLE_DATA."
    assert findings["rl: simulator"]["fix"] == install_line("rl")
    assert all(each["fix"] for each in findings.values() if each["state"] != "ok")
    assert not Path("runs").exists()
    Path("file").write_text("")
    code, out, _ = dipole(capsys, "doctor", "--runs", "file/runs")
    assert (code, "broken   runs folder" in out, "remove it, or" in out) == (1, True, False)
    numpy = metadata.version("numpy")
    bounds = ["torch>=2.11", f"numpy>={numpy},<99", "numpy<1", "numpy!=1.0,>98", "no-such-package>=1"]
    old = [f"numpy {numpy} (wanted {bound})" for bound in ("<1", "!=1.0,>98")]
    assert doctor._compare([Requirement(each) for each in bounds]) == (["no-such-package"], old)


def test_killed_and_interrupted_processes_continue(blobs, tmp_path):
    common = ("train", blobs, "--set", "train.steps=30", "train.checkpoint_every=4", "train.log_every=1", "--runs")

    def logged() -> int:
        return sum(len(read_metrics(path)) for path in (tmp_path / "parts").glob("*/metrics.jsonl"))

    start = partial(Python, "-m", "blobs_domain", *common, "parts", cwd=tmp_path, BLOBS_SECONDS="0.04")
    process = start()
    wait_for(lambda: logged() >= 6, process)
    process.process.kill()
    process.communicate()
    (path,) = (tmp_path / "parts").glob("*/record.json")
    assert (read_record(path).status, json.loads(path.read_text())["status"]) == ("interrupted", "running")
    if POSIX:
        process, before = start(), logged()
        wait_for(lambda: logged() > before + 5, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
        assert (process.returncode, "Traceback" in err) == (1, False)
        assert not set("\x1b\r\u2501\u2588") & set(out + err)  # no bar is drawn into a pipe
        assert re.search("continuing at step.*Repeat the command to continue.", err, re.DOTALL)
    for runs in ("parts", "whole"):
        assert cli.main([*map(str, common), runs, "--quiet"]) == 0
    assert_same_bits(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize("command", [*cli.names(), "data get", "data list", "data wiki3029"])
def test_help_fits_and_ends_with_two_examples_that_parse(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = dipole(capsys, *command.split(), "--help")[1].rstrip().splitlines()
    assert (max(map(len, lines)) <= 80, lines[-3]) == (True, "examples:")
    for line in lines[-2:]:
        assert f"{line.strip()} ".startswith(f"dipole {command} ")
        _, name, *arguments = shlex.split(line.partition(" > ")[0])
        if command == "data get":
            assert arguments[1] in fetched()
        parser_of(name).parse_args(arguments)


def parser_of(name: str) -> cli.Parser:
    parser = cli.Parser(f"dipole {name}", (configure := cli._find(name)).__doc__)
    configure(parser)
    return parser


@pytest.mark.parametrize(
    "line",
    ["", "--help", "list", "show dp", "show triplet", "show rl", "show train", "show simclr", "data list",
     "theory --list", "bench", "show simcrl", "train simcrl", "nonsense", "bench nonsense"],
)  # fmt: skip
@pytest.mark.parametrize("width", [80, 60])
def test_tables_and_messages_fit_the_terminal(line, width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, err = dipole(capsys, *line.split())
    assert max(map(len, (out + err).splitlines())) <= width


def test_every_command_is_in_the_help_with_a_summary(capsys):
    files = {path.stem for path in Path(cli.commands.__file__).parent.glob("*.py")} - {"__init__"}
    assert files <= set(cli.names())
    out = dipole(capsys, "--help")[1]
    for name in cli.names():
        assert re.search(rf"^  {name} +[A-Z].*\.$", out, re.MULTILINE), name
    # The command alone shows where to start, and then every command in a group.
    start, *groups = dipole(capsys)[2].split("start here:\n")[1].split("\n\n")
    assert all(words in start for words in ("dipole demo", "dipole train", "dipole bench", "docs"))
    shown = [line.split()[0] for group in groups for line in group.splitlines() if re.match(r"  [a-z]+ +[A-Z]", line)]
    assert sorted(shown) == cli.names()


@pytest.mark.parametrize("option", ["-o", "--out"])
@pytest.mark.parametrize("line", [*WRITERS, "results add r", "theory r", "play r"])
def test_o_and_out_name_what_is_written(option, line, capsys):
    name, *rest = line.split()
    assert Path("place") in vars(parser_of(name).parse_args([*rest, option, "place"])).values()
    for wrong, said in (("", "is empty"), ("-", "standard output")):  # "" as from a variable without a value
        assert said in dipole(capsys, name, *rest, option, wrong)[2]
    for words in (["embed", "r"], ["report"], ["results", "list"], ["train", "r", "--resume"]):
        assert "is empty" in dipole(capsys, *words, "")[2]


@pytest.mark.parametrize("line", ["new a", "export r --to onnx", "data get cifar10 --yes", "report ."])
def test_a_place_that_cannot_be_made_is_no_unexpected_error(line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = dipole(capsys, *line.split(), "-o", "y" * 300)[2]
    assert (error.startswith("error: "), "unexpected" in error) == (True, False)


def test_a_command_of_a_package_that_is_no_function_is_named(capsys, command_of_a_package):
    point = command_of_a_package("greet", 3)
    words = "it is of type int, not a function that adds arguments"
    said = refused(capsys, "greet", "--help", code=1)
    assert f"'greet' of (no package) (dipole.commands: their_commands:ENTRY): {words}" in said
    assert [each.point for each in broken_plugins("commands")] == [point]
