"""The line that installs what is missing."""

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dipole.rl.episodes
import dipole.text.senteval
import dipole.vision
from dipole.core.cli import main
from dipole.core.utils import extras
from dipole.core.utils.extras import install_line

ROOT = Path(__file__).resolve().parent.parent
CHECKOUT, EDITABLE = {"dir_info": {}}, {"dir_info": {"editable": True}}


@pytest.mark.parametrize(
    ("url", "more", "extra", "line"),
    [
        (None, {}, "board", 'pip install "assay[board]"'),
        ("file:///a/w.whl", {"archive_info": {}}, "board", 'pip install "assay[board] @ file:///a/w.whl"'),
        ("file:///my%20work/assay", CHECKOUT, "board", 'pip install "/my work/assay[board]"'),
        (
            "https://host/assay", {"vcs_info": {"vcs": "git", "commit_id": "12ab"}}, "board",
            'pip install "assay[board] @ git+https://host/assay@12ab"',
        ),
        ("file:///my%20work/assay", EDITABLE, "board", 'pip install -e "/my work/assay[board]"'),
        ("file:///my$work/assay", EDITABLE, "board", "pip install -e '/my$work/assay[board]'"),
        # On Windows, as Windows names it.
        ("file:///C:/Users/me/dipole", EDITABLE, "board", r'pip install -e "C:\Users\me\dipole[board]"'),
        ("file:///C:/Users/me/dipole", EDITABLE, "", r"pip install -e C:\Users\me\dipole"),
        ("file:///d:/my%20work/dipole", EDITABLE, "", r'pip install -e "D:\my work\dipole"'),
        ("file://server/share/my%20work", EDITABLE, "board", r'pip install -e "\\server\share\my work[board]"'),
    ],
)  # fmt: skip
def test_the_line_installs_from_where_the_package_came_from(tmp_path, monkeypatch, url, more, extra, line):
    information = tmp_path / "assay-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: assay\nVersion: 1.0\n")
    if url is not None:
        (information / "direct_url.json").write_text(json.dumps({"url": url, **more}))
    monkeypatch.syspath_prepend(tmp_path)
    if "\\" in line:
        converter = pytest.importorskip("nturl2path")  # what urllib.request has there
        monkeypatch.setattr("urllib.request.url2pathname", converter.url2pathname)
        monkeypatch.setattr(extras, "WINDOWS", True)
    assert install_line(extra, "assay") == line
    assert bool(extras.source_folder("assay")) == ("dir_info" in more)
    assert install_line(package="absent-package") == "pip install absent-package"


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    "word",
    ["a[b]", "x>=3,<4", "my work", "a$HOME", "a`b`", 'a"b', "a'b", "a\\b", "a!b", "a&b", "", "*", "~", "a-1.0/b"],
)
def test_a_quoted_word_is_the_word(word):
    command = ["bash", "-c", f"printf %s {extras.quoted(word)}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == word


# Every name that a package hands out by its `__getattr__`, and every import that the pages show, in a process that sees
# no distribution but dipole and what it always asks for.
CORE_ALONE = """
import sys
from importlib import import_module
from importlib.machinery import PathFinder

absent = set(sys.argv[1].split(","))

class Fewer(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in absent else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Fewer
for line in sys.stdin.read().split():
    module, name = line.split(":")
    try:
        getattr(import_module(module), name)
        said = "here"
    except Exception as error:
        said = f"{type(error).__name__} {error}"
    print(line, said, sep="\t")
"""
HANDED_OUT = {
    "dipole": dipole._HOME,
    "dipole.rl": dipole.rl._HOME,
    "dipole.rl.episodes": dipole.rl.episodes._HOME,
    "dipole.text": dipole.text._HOME,
    "dipole.text.senteval": dipole.text.senteval.__all__,
    "dipole.vision": dipole.vision._HOME,
    "dipole.vision.export": ["DipoleVisionConfig", "DipoleVisionModel"],
    "dipole.vision.toy": ["ToyAdapter", "ToyConfig"],
    "dipole.core.train.objective_callback": ["ObjectiveCallback"],
}
SHOWN = re.compile(r"^from (dipole[\w.]*) import ([\w, ]+)$", re.MULTILINE)


def core_alone() -> list[str]:
    """Names to import of all that is installed beside what dipole always asks for."""
    wanted, more = set(), {"dipole"}
    while more:
        wanted |= more
        lines = [Requirement(line) for each in more for line in _asked(each)]
        lines = [line for line in lines if line.marker is None or line.marker.evaluate({"extra": ""})]
        more = {canonicalize_name(line.name) for line in lines} - wanted
    found = packages_distributions().items()
    return [name for name, owners in found if not {canonicalize_name(each) for each in owners} & wanted]


def _asked(package: str) -> list[str]:
    try:
        return requires(package) or []
    except PackageNotFoundError:  # torch's own CUDA libraries, in a build without
        return []


def test_every_name_is_there_or_says_what_to_install():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    names = {f"{module}:{name}" for module, given in HANDED_OUT.items() for name in given}
    for page in pages:
        for module, shown in SHOWN.findall(page.read_text(encoding="utf-8")):
            names |= {f"{module}:{name.split()[0]}" for name in shown.split(",")}
    absent = core_alone()
    assert {"gymnasium", "transformers", "PIL", "matplotlib"} & set(absent)
    assert not {"torch", "numpy", "sklearn", "pydantic"} & set(absent)
    done = subprocess.run(
        [sys.executable, "-c", CORE_ALONE, ",".join(absent)], input="\n".join(sorted(names)),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    said = dict(line.split("\t") for line in done.stdout.splitlines())
    assert said.keys() == names
    message = r'ConfigError \S+ needs \S+; install it with: pip install .*\[\w+(-\w+)*\]"'
    assert not {name: text for name, text in said.items() if text != "here" and not re.fullmatch(message, text)}
    assert "[rl]" in said["dipole.rl:ContrastiveSAC"]
    assert "[sentence-transformers]" in said["dipole.text:ContrastiveLoss"]
    assert said["dipole:objective"] == "here"


RUN = [
    "train.epochs=", "train.steps=1", "train.warmup=0", "train.batch_size=16", "vision.data.limit=32",
    "vision.probe.probes=['knn']", "vision.probe.baselines=false",
]  # fmt: skip
SPACE = "train.learning_rate=log(1e-4, 1e-2)"
NEEDS = {
    "optuna": (["sweep", "digits-simclr", "--space", SPACE, "--metric", "knn/accuracy"], "sweep"),
    "submitit": (["bench", "demo", "--engine", "slurm"], "slurm"),
    "ray": (["bench", "demo", "--engine", "ray"], "ray"),
    "jinja2": (["report", "RUNS", "-o", "report.html"], "report"),
}
for _name in ("wandb", "mlflow", "trackio", "tensorboard"):
    NEEDS[_name] = ["train", "digits-simclr", "--log", _name, "--set", *RUN], _name
for _name in ("onnx", "onnxscript", "onnxruntime"):
    NEEDS[_name] = ["export", "RUN", "--to", "onnx", "--out", "OUT"], "onnx"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    assert main(["train", "digits-simclr", "--quiet", "--runs", str(runs), "--set", *RUN]) == 0
    return next(path for path in runs.iterdir() if path.is_dir() and not path.name.startswith("."))


@pytest.mark.parametrize("package", NEEDS)
def test_what_is_missing_is_one_message_before_any_work(package, trained, tmp_path, monkeypatch, capsys):
    command, extra = NEEDS[package]
    monkeypatch.chdir(tmp_path)
    for name in [each for each in sys.modules if each.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    places = {"RUNS": str(trained.parent), "RUN": str(trained), "OUT": str(tmp_path / "out")}
    capsys.readouterr()
    code = main([places.get(word, word) for word in command])
    said = capsys.readouterr().err
    assert code != 0
    assert install_line(extra) in said
    assert "Traceback" not in said
    assert not list(tmp_path.glob("runs/*/metrics.jsonl"))
