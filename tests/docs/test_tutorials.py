"""Every tutorial runs on its small settings, in a kernel as well, and installs what it needs. Its page shows that."""

import ast
import base64
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

pytest.importorskip("jupytext")
import install
import jupytext
import nbformat
import tutorials

from tests.ranks import run_python

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "tutorials"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
NEEDS = {
    "1-own-regularizer": ("gymnasium", "datasets"),
    "2-agent-you-have": ("stable_baselines3",),
    "3-sentence-encoder": ("sentence_transformers", "datasets", "mteb"),
}
SAYS = {
    "1-own-regularizer": (
        r"^apart\(ceiling=0\.2\): passes \d\d checks$",
        r"^  -     ranks +.*Apart is defined in a notebook.* `%%writefile apart\.py` .* `dipole check apart:Apart`$",
        r"^digits-simclr +infonce \+ 0\.1\*apart +few_shot/accuracy 0\.\d+ +uniformity -\d",
        r"^pydoc-bow +infonce \+ 0\.1\*apart +next@10 ",
        r"^dot +infonce \+ 0\.1\*apart +return/mean ",
        r"^infonce\(temperature=1\) \+ 5\*apart\(ceiling=0\.2\) above the ceiling: \d+\.\d% of the pairs$",
    ),
    "2-agent-you-have": (
        r"^alone +mean of the curve +\d+\.\d\d \+- \d+\.\d\d   at the end +\d+\.\d\d$",
        r"^infonce +mean of the curve .* against alone [+-]\d+\.\d\d \([+-]\d+\.\d\d to [+-]\d+\.\d\d\)$",
        r"^with dp +mean distance 0\.\d+$",
    ),
    "3-sentence-encoder": (
        r"^ +before +after$",
        r"^SentEval, as TREC +\d+\.\d +\d+\.\d$",
        r"^MTEB PythonTopics +\d+\.\d +\d+\.\d$",
        r"^always the most frequent topic: \d+\.\d$",
    ),
    "4-table-to-verdict": (
        r"^\[3/3\] done +[0-9a-f]{12} ",
        r"^Report: dipole report runs shipped -o report\.html$",
        r"^arora-c06: differs \(other protocol\)$",
        r"^lmcl-c01: cannot be decided at this n \(other protocol\)$",
        r"[.] These seeds show a distance of \d+\.\d+ from the bound or more$",
    ),
    "5-geometry": (
        r"^too much +uniformity -0\.\d\d +directions +\d\.\d of 64 +inside the margin 0\.0\d$",
        r"^dipole compare [0-9a-f]{12} [0-9a-f]{12}$",
    ),
}
ENVIRONMENT = {
    "DIPOLE_TUTORIAL": "small",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
}
HOMES = cache(importlib.metadata.packages_distributions)
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhlnsu]")  # of the cursor and the screen (colours end in m)


def source(name: str) -> str:
    return (FOLDER / f"{name}.py").read_text(encoding="utf-8")


def cells(name: str) -> list[nbformat.NotebookNode]:
    return jupytext.read(FOLDER / f"{name}.py").cells


def cell_with(name: str, text: str) -> str:
    """The source of the one cell that has this text."""
    (found,) = (each.source for each in cells(name) if text in each.source)
    return found


def run(*command: str | Path, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = ENVIRONMENT | {"MPLBACKEND": "Agg"} | more
    if command[0] == "-m":
        return run_python(*command, cwd=folder, **environment)
    command, environment = (sys.executable, *command), os.environ | environment
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)


QUICK = {"2-agent-you-have": ("range(2), 240, 80", "range(2), 80, 40")}  # `make docs` runs all as they are


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NAMES])
def test_tutorial_runs_and_prints_what_its_text_describes(name, tmp_path):
    for package in ("matplotlib", *NEEDS.get(name, ())):
        pytest.importorskip(package)
    old, new = QUICK.get(name, ("# %%", "# %%"))
    assert old in source(name)
    (tmp_path / "tutorial.py").write_text(source(name).replace(old, new))
    done = run("-m", "tutorial", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for line in SAYS[name]:
        assert re.search(line, done.stdout, re.MULTILINE), (line, done.stdout)
    assert tutorials.unexpected(done.stderr) == ""
    if name == "5-geometry":
        (compared,) = re.findall(r"^dipole (compare .*)$", done.stdout, re.MULTILINE)
        again = run("-m", "dipole", *compared.split(), folder=tmp_path)
        assert again.returncode == 0, again.stderr


def test_first_tutorial_passes_the_rank_check_from_a_file(tmp_path):
    (tmp_path / "apart.py").write_text(cell_with("1-own-regularizer", "class Apart"))
    done = run("-m", "dipole", "check", "apart:Apart", "--only", "ranks", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^  ok    ranks ", done.stdout, re.MULTILINE)


def test_third_tutorial_offline_names_the_small_setting(tmp_path, monkeypatch):
    pytest.importorskip("sentence_transformers")
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(RuntimeError) as caught:
        exec(cell_with("3-sentence-encoder", "def published"), {"SMALL": False, "pairs": []})
    assert str(caught.value) == (
        "sentence-transformers/all-MiniLM-L6-v2 cannot be fetched here. "
        "With DIPOLE_TUTORIAL=small in the environment nothing is downloaded."
    )


def executed(sources: list[str], folder: Path) -> list[dict[str, str]]:
    """The output of each cell of a notebook, by stream, from a kernel in the folder."""
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in sources])
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}})
    client.execute(env=os.environ | ENVIRONMENT)
    outputs = [[each for each in cell.outputs if each.output_type == "stream"] for cell in notebook.cells]
    return [
        {name: "".join(each.text for each in cell if each.name == name) for name in ("stdout", "stderr")}
        for cell in outputs
    ]


def test_a_kernel_shows_progress_and_no_bar(tmp_path):
    """In the cell's own process as a line that is written over, and of a child line by line."""
    training = """
        from pathlib import Path
        from dipole.core.train.run import train
        from dipole.core.train.recipe import load_recipe
        small = ["train.epochs=4", "vision.data.limit=400", "vision.probe.baselines=false"]
        train(load_recipe("digits-simclr", small).config, Path("runs"))
        """
    helper, _, _ = cell_with("4-table-to-verdict", "def dipole").partition('\n\ndipole("bench"')
    bench = f'{helper}\n\ndipole("bench", "lmcl-table1", "--known", "shipped")'
    coloured = """
        import os, subprocess, sys
        assert os.environ.setdefault("FORCE_COLOR", "1") == "1"
        command = ["bench", "lmcl-table1", "--seeds", "1", "--jobs", "1", "--threads", "1", "--set", "train.steps=2"]
        child = [sys.executable, "-m", "dipole", *command]
        print(subprocess.run(child, capture_output=True, text=True, check=True).stdout)
        """
    unindented = [re.sub(r"^ {8}", "", each, flags=re.MULTILINE) for each in (training, coloured)]
    own, child, forced = executed([unindented[0], bench, unindented[1]], tmp_path)
    assert re.search(r"\rstep \d+/\d+ .* about \d+s left", own["stderr"])
    assert "\x1b" not in own["stderr"] + own["stdout"]
    assert "120 of 120 runs are finished already." in child["stdout"]
    assert "\x1b" not in child["stdout"]
    assert re.search(r"^\[6/6\] done ", forced["stdout"], re.MULTILINE)
    assert not CONTROL.search(forced["stdout"])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_cells_run_in_a_kernel_and_once_more(name, tmp_path):
    for package in ("matplotlib", *NEEDS.get(name, ())):
        pytest.importorskip(package)
    sources = [each.source for each in cells(name) if each.cell_type == "code"]
    said = executed([each for source in sources for each in (source, source)], tmp_path)
    assert "\x1b" not in "".join(each["stdout"] + each["stderr"] for each in said)


@pytest.mark.parametrize("name", NAMES)
def test_tutorial_states_its_duration_and_installs_from_one_place(name):
    assert [name[0] for name in NAMES] == ["1", "2", "3", "4", "5"]
    head = cells(name)[0].source
    assert head.startswith("# ")
    assert re.search(r"Time on one core: \d+ s with `DIPOLE_TUTORIAL=small`, ", head.replace("\n", " "))
    drawn = [cell for cell in cells(name) if "plt.show()" in cell.source]
    assert drawn
    assert all(len(cell.metadata.get("alt", "")) > 20 for cell in drawn)
    first = next(cell for cell in cells(name) if cell.cell_type == "code")
    assert first.source == tutorials.install_cell(name, install.source()), "python docs/generate/tutorials.py writes it"


@pytest.mark.parametrize("name", NAMES)
def test_first_cell_installs_every_import(name):
    brought, asked, waiting = set(), set(), [Requirement(each) for each in tutorials.PACKAGES[name]]
    while waiting:
        wanted = waiting.pop()
        if (key := (wanted.name.lower().replace("_", "-"), frozenset(wanted.extras))) in asked:
            continue
        asked.add(key)
        try:
            distribution = importlib.metadata.distribution(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        brought.add(key[0])
        for requirement in map(Requirement, distribution.requires or ()):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)):
                waiting.append(requirement)
    for node in ast.walk(ast.parse(source(name))):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for module in {each.partition(".")[0] for each in modules} - sys.stdlib_module_names:
            owners = {each.lower().replace("_", "-") for each in HOMES().get(module, [])}
            assert owners & brought, f"nothing that the first cell installs brings {module}"


@pytest.mark.parametrize(("place", "found", "said"), [
    ("git+https://host/repository", True, ""),
    ("file:///checkout", False, "pip cannot install dipole from file:///checkout"),
    ("", False, "RuntimeError: Set DIPOLE_SOURCE to git+URL or file:///CHECKOUT."),
])  # fmt: skip
def test_first_cell_calls_pip_and_names_the_fix(place, found, said, tmp_path):
    """In an environment without dipole, whose pip writes down what it is asked for."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    noted = "import pathlib, sys\npathlib.Path('asked').write_text(' '.join(sys.argv[1:]))\n"
    (tmp_path / "pip" / "__main__.py").write_text(f"{noted}sys.exit({0 if found else 1})\n")
    (tmp_path / "cell.py").write_text(tutorials.install_cell("2-agent-you-have"))
    done = run("-S", "cell.py", folder=tmp_path, PYTHONPATH=str(tmp_path), PIP_NO_INDEX="1", DIPOLE_SOURCE=place)
    asked = tmp_path / "asked"
    assert asked.exists() == bool(place)  # without a source nothing is installed
    assert not place or asked.read_text() == f"install -q dipole[rl] @ {place}"
    assert done.returncode == (0 if found else 1)
    assert said in "".join(done.stderr.splitlines()[-1:])
    # Nor beside dipole.
    (tmp_path / "cell.py").write_text(tutorials.install_cell("1-own-regularizer").replace("subprocess.run(", "print("))
    done = run("cell.py", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")


def cell(kind: str, source: str, alt: str = "", output: str = "", pictures: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"kind": kind, "source": source, "alt": alt, "output": output, "pictures": list(pictures)}


CELLS = [
    cell("markdown", "# A title\n\nAbout."),
    cell("code", "import install"),
    cell("markdown", "[core](../core.md#a) [next](2-b.md) [x](https://x.org/y.md)"),
    cell("code", "print(1)", "A line.", "1\n", ("1-a-3-1",)),
]
NOWHERE = tutorials.Site.of(None, None, None)
SOMEWHERE = tutorials.Site.of("https://host/docs/", "https://github.com/owner/repository", None)


def test_pages_and_index_show_outputs_and_links():
    page = tutorials.page(Path("1-a.py"), CELLS, NOWHERE)
    assert page.startswith("# A title\n\nAbout.\n\n[Download it as a notebook](1-a.ipynb){ download }. This page shows")
    assert '??? note "Install"\n\n    ```python\n    import install\n    ```' in page
    assert "```text\n1\n```\n\n![A line.](1-a-3-1.svg)" in page
    assert "[core](../core.md#a)" in page
    assert "olab" not in tutorials.page(Path("1-a.py"), CELLS, NOWHERE)
    page = tutorials.page(Path("1-a.py"), CELLS, SOMEWHERE)
    notebooks = "https://colab.research.google.com/github/owner/repository/blob/gh-pages/latest/tutorials/"
    assert f"[open it on Colab]({notebooks}1-a.ipynb)" in page
    assert "git+https://github.com/owner/repository" in tutorials.install_cell(NAMES[0], SOMEWHERE.source)
    own = tutorials.Site.of(None, "https://host/repository", "https://colab.host/")
    assert (own.colab, own.source) == ("https://colab.host/", "git+https://host/repository")
    assert tutorials.Site.of(None, "https://host/repository", None).colab == ""
    index = tutorials.index()
    for name in NAMES:
        assert f"]({name}.md)" in index
    assert index.count("Time on one core: ") == len(NAMES)
    assert '`pip install ".[text,sentence-transformers]" mteb matplotlib`' in index


def test_a_notebook_has_outputs_and_links_that_lead_to_the_site():
    written = nbformat.reads(tutorials.notebook(CELLS, NOWHERE, lambda name: name.encode()), as_version=4)
    nbformat.validate(written)
    assert written.metadata["kernelspec"]["name"] == "python3"
    assert written.cells[2].source == "[core](../core.html#a) [next](2-b.html) [x](https://x.org/y.md)"
    printed, drawn = written.cells[3].outputs
    assert printed.text == "1\n"
    assert base64.b64decode(drawn.data["image/png"]) == b"1-a-3-1.png"
    online = nbformat.reads(tutorials.notebook(CELLS, SOMEWHERE, lambda name: b""), as_version=4)
    assert "[core](https://host/docs/core.html#a)" in online.cells[2].source
    assert "[next](https://host/docs/tutorials/2-b.html)" in online.cells[2].source


@pytest.mark.parametrize(("output", "alt", "said"), [
    ("runs/0123 is there", "A line.", ""),
    (f"{Path.home()}/runs", "A line.", "place of this machine"),
    ("\x1b[1mbold\x1b[0m", "A line.", "escape codes"),
    ("fine", "", "does not say what it shows"),
])  # fmt: skip
def test_rejects_unexpected_outputs(output, alt, said):
    found = tutorials.problems([CELLS[3] | {"output": output, "alt": alt}])
    assert said in found
    assert bool(found) == bool(said)
    progress = "step 3/9  loss 2  about 1s left\r\r 10%|#   | 1/10 [00:01]\n\nTREC   acc 61.11 +- 2  dev 60\n"
    odd = "a.py:3: UserWarning: odd\n  call()"
    assert [tutorials.unexpected(each) for each in (progress, f"{progress}{odd}\n")] == ["", odd]


def test_execution_keeps_output_and_figures_and_names_lines(tmp_path):
    pytest.importorskip("matplotlib")
    script = tmp_path / "9-some.py"
    script.write_text(
        '# %% [markdown]\n# # Some\n\n# %%\nfrom pathlib import Path\nPath("left").touch()\nprint("said")\n\n'
        '# %% alt="A line."\nimport matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\n'
    )
    folder = tmp_path / "out"
    folder.mkdir()
    executing = ROOT / "docs" / "generate" / "execute.py"
    assert run(executing, script, folder, folder=tmp_path).returncode == 0
    _, said, drawn = json.loads((folder / "cells.json").read_text())
    assert said["output"] == "said\n"
    assert (drawn["alt"], drawn["pictures"]) == ("A line.", ["9-some-2-1"])
    assert {path.name for path in folder.iterdir()} == {"cells.json", "work", "9-some-2-1.svg", "9-some-2-1.png"}
    assert [path.name for path in (folder / "work").iterdir()] == ["left"]
    script.write_text(script.read_text().replace("plt.plot([1, 2])", "plt.plot([1], [2, 3])"))
    again = tmp_path / "again"
    again.mkdir()
    assert '9-some.py", line 11, in <module>' in run(executing, script, again, folder=tmp_path).stderr
