"""Every tutorial runs on its small settings, opens as a notebook, and installs what it needs on Colab."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "tutorials"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
NEEDS = {
    "1-own-regularizer": ("gymnasium", "datasets"),
    "2-agent-you-have": ("stable_baselines3",),
    "3-sentence-encoder": ("sentence_transformers", "datasets"),
}


def test_all_six_are_here() -> None:
    assert [name[0] for name in NAMES] == ["1", "2", "3", "4", "5", "6"]


@pytest.mark.parametrize("name", NAMES)
def test_it_runs(name: str, tmp_path: Path) -> None:
    for package in ("matplotlib", *NEEDS.get(name, ())):
        pytest.importorskip(package)
    environment = os.environ | {"DIPOLE_TUTORIAL": "small", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("name", NAMES)
def test_it_has_cells_and_the_first_installs_on_colab(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    cells = re.split(r"^# %%", text, flags=re.MULTILINE)[1:]
    assert cells[0].startswith(" [markdown]\n# # ")
    code = [cell for cell in cells if not cell.startswith(" [markdown]")]
    assert '"google.colab" in sys.modules' in code[0]
    assert re.search(r'"install", "-q", "dipole', code[0])
    assert any("plt.show()" in cell for cell in code)


def test_a_notebook_has_the_same_cells() -> None:
    jupytext = pytest.importorskip("jupytext")
    for name in NAMES:
        script = jupytext.read(FOLDER / f"{name}.py")
        notebook = jupytext.reads(jupytext.writes(script, fmt="ipynb"), fmt="ipynb")
        assert [cell.source for cell in notebook.cells] == [cell.source for cell in script.cells]
        assert notebook.metadata["kernelspec"]["name"] == "python3"
