"""Build pages and notebooks from the tutorials, which are scripts with cells.

python docs/generate/tutorials.py      # writes the first code cell of every script anew, from INSTALL and PACKAGES
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import install
import jupytext
import nbformat

FOLDER = Path(__file__).resolve().parents[1] / "tutorials"

PACKAGES = {
    "1-own-regularizer": ("dipole[vision,text,rl]",),
    "2-agent-you-have": ("dipole[rl]",),
    "3-sentence-encoder": ("dipole[text,sentence-transformers]", "mteb", "matplotlib"),
    "4-table-to-verdict": ("dipole[vision,text,report]",),
    "5-geometry": ("dipole[vision]",),
}
"""Requirements of each tutorial. dipole with its extras is first."""

INSTALL = """\
import importlib.util
import os
import subprocess
import sys

if importlib.util.find_spec("dipole") is None:  # on Colab, for example
    source = os.environ.get("DIPOLE_SOURCE", "{source}")  # git+URL or file:///CHECKOUT
    if not source:
        raise RuntimeError("Set DIPOLE_SOURCE to git+URL or file:///CHECKOUT.")
    command = [sys.executable, "-m", "pip", "install", "-q"]
    packages = [f"{first} @ {{source}}"{others}]
    if subprocess.run(command + packages).returncode:
        raise RuntimeError(f"pip cannot install dipole from {{source}}.")"""

PROGRESS = re.compile(
    r"\s*$"
    r"|.*\d+%\|"  # tqdm
    r"|(step|task) \d+/\d+ "  # dipole's own
    r"|(step \d+|test part)[:,] |finished \d+ steps |negatives per anchor: "
    r"|.*: return \d+\.\d$"
    r"|\w+ +acc \d+\.\d+ "
)
"""Lines of stderr that pages omit."""

EXPECTED = (
    "get_sentence_embedding_dimension",  # mteb calls sentence-transformers by a deprecated name
    "the term 'dp' dominates",  # 5-geometry trains such a run on purpose
)
"""Warnings that pages omit."""

LINK = re.compile(r"\]\((?!\w+:)([^)\s#]+)\.md(#[^)\s]*)?\)")


@dataclass(frozen=True)
class Site:
    """The address of the site. It is unknown if the site is opened from a folder.

    Attributes:
        url: its address, with a slash at the end.
        source: where pip finds dipole, as `install.source`.
        colab: the address that a notebook's name is put behind to open it on Colab.
    """

    url: str = ""
    source: str = ""
    colab: str = ""

    @classmethod
    def of(cls, url: str | None, repository: str | None, colab: str | None) -> Site:
        """Read the addresses from mkdocs. Without `extra.colab`, use the notebooks of gh-pages."""
        repository = (repository or "").rstrip("/")
        owner = repository.removeprefix("https://github.com/")
        if not colab and owner != repository:
            colab = f"https://colab.research.google.com/github/{owner}/blob/gh-pages/latest/tutorials/"
        return cls(url or "", f"git+{repository}" if repository else "", colab or "")


def scripts() -> list[Path]:
    """Return all tutorials in order."""
    return sorted(FOLDER.glob("*.py"))


def title(script: Path) -> str:
    """Return the first heading."""
    return _head(script)[0].removeprefix("# ")


def index() -> str:
    """Return the index page: topic, duration and requirements of each tutorial."""
    parts = [
        "# Tutorials\n\nScripts with cells: they run as they are, open as notebooks, and are among the tests. Their "
        "pages show the small setting."
    ]
    for script in scripts():
        _, about, time = _head(script)
        own, *others = PACKAGES[script.stem]
        needs = " ".join([install.line(*own[len("dipole[") : -1].split(",")), *others])
        parts.append(f"## [{title(script)}]({script.stem}.md)\n\n{about}\n\n{time}\n\nIn the checkout: `{needs}`")
    return "\n\n".join(parts) + "\n"


def install_cell(name: str, source: str = "") -> str:
    """Return the first code cell of a tutorial.

    Args:
        name: of its script, without ending.
        source: as `install.source`.
    """
    first, *others = PACKAGES[name]
    return INSTALL.format(source=source, first=first, others="".join(f', "{each}"' for each in others))


def files(script: Path, run: bool, site: Site) -> Iterator[tuple[str, bytes]]:
    """Return names and contents of a tutorial's page, notebook and pictures.

    Args:
        script: the tutorial.
        run: execute it on its small settings, so that page and notebook have what it prints and draws.
        site: where they will stand.

    Raises:
        RuntimeError: if it does not run, says something unexpected on stderr, names a place of this machine, or draws a
            picture that no `alt` describes.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cells = _run(script, folder) if run else _read(script)
        if said := problems(cells):
            raise RuntimeError(f"the tutorial {script.name}: {said}")
        written = next(cell for cell in cells if cell["kind"] == "code")
        written["source"] = install_cell(script.stem, site.source)
        yield f"{script.stem}.md", page(script, cells, site).encode()
        yield f"{script.stem}.ipynb", notebook(cells, site, lambda name: (folder / name).read_bytes()).encode()
        yield from ((path.name, path.read_bytes()) for path in sorted(folder.glob("*.svg")))


def problems(cells: list[dict[str, Any]]) -> str:
    """Return the problem with a tutorial's outputs, or ""."""
    places = (tempfile.gettempdir(), str(Path.home()), sys.prefix, str(FOLDER.parents[1]))
    for cell in cells:
        if found := [place for place in places if len(place) > 1 and place in cell["output"]]:
            return f"a cell prints a place of this machine, {found[0]}"
        if "\x1b" in cell["output"]:
            return "a cell prints escape codes"
        if cell["pictures"] and not cell["alt"]:
            return 'a cell draws a picture and does not say what it shows: # %% alt="..."'
    return ""


def unexpected(stderr: str) -> str:
    """Return a tutorial's stderr without progress lines, i.e. its warnings."""
    lines = re.split(r"[\r\n]+", stderr)
    lines = [line for line in lines if not PROGRESS.match(line)]
    return "\n".join(line for line in lines if not any(known in line for known in EXPECTED))


def _head(script: Path) -> list[str]:
    """Return the paragraphs of the first cell: heading, topic, duration."""
    return jupytext.read(script).cells[0].source.split("\n\n")


def _read(script: Path) -> list[dict[str, Any]]:
    cells = jupytext.read(script).cells
    return [{"kind": cell.cell_type, "source": cell.source, "alt": "", "output": "", "pictures": []} for cell in cells]


def _run(script: Path, folder: Path) -> list[dict[str, Any]]:
    environment = os.environ | {"DIPOLE_TUTORIAL": "small", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("execute.py")), str(script), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the tutorial {script.name} does not run:\n{done.stderr}")
    if said := unexpected(done.stderr):
        raise RuntimeError(f"the tutorial {script.name} says on stderr:\n{said}")
    return json.loads((folder / "cells.json").read_text(encoding="utf-8"))


def page(script: Path, cells: list[dict[str, Any]], site: Site) -> str:
    """Return the Markdown of a tutorial with its outputs."""
    opened = [f"[Download it as a notebook]({script.stem}.ipynb){{ download }}"]
    if site.colab:
        opened.append(f"[open it on Colab]({urljoin(site.colab, f'{script.stem}.ipynb')})")
    head = (
        f"{' or '.join(opened)}. This page shows the small setting: `DIPOLE_TUTORIAL=small` in the environment, or "
        "`%env DIPOLE_TUTORIAL=small` in the first cell of a notebook."
    )
    parts = [cells[0]["source"], head]
    installs = next(cell for cell in cells if cell["kind"] == "code")
    for cell in cells[1:]:
        if cell["kind"] == "markdown":
            parts.append(cell["source"])
        elif cell is installs:
            lines = "\n".join(f"    {line}".rstrip() for line in f"```python\n{cell['source']}\n```".splitlines())
            parts.append(f'??? note "Install"\n\n{lines}')
        elif cell["source"].strip():
            parts.append(f"```python\n{cell['source']}\n```")
        if cell["output"].strip():
            parts.append(f"```text\n{cell['output'].rstrip()}\n```")
        parts += [f"![{cell['alt']}]({picture}.svg)" for picture in cell["pictures"]]
    return "\n\n".join(parts) + "\n"


def notebook(cells: list[dict[str, Any]], site: Site, content: Callable[[str], bytes]) -> str:
    """Return the notebook of a tutorial with its outputs.

    Args:
        cells: with their outputs.
        site: where it will stand; its links lead there.
        content: of a picture, by its name.
    """
    v4, written = nbformat.v4, []
    for number, cell in enumerate(cells):
        if cell["kind"] == "markdown":
            written.append(v4.new_markdown_cell(_linked(cell["source"], site.url), id=f"cell-{number}"))
            continue
        outputs = [v4.new_output("stream", name="stdout", text=cell["output"])] if cell["output"] else []
        for picture in cell["pictures"]:
            image = base64.b64encode(content(f"{picture}.png")).decode()
            outputs.append(v4.new_output("display_data", {"image/png": image, "text/plain": cell["alt"]}))
        written.append(v4.new_code_cell(cell["source"], id=f"cell-{number}", outputs=outputs))
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return nbformat.writes(v4.new_notebook(cells=written, metadata=kernel))


def _linked(markdown: str, url: str) -> str:
    """Rewrite links for a notebook: to the site, or to the page in the same folder."""

    def link(match: re.Match[str]) -> str:
        page, anchor = match.groups()
        return f"]({urljoin(f'{url}tutorials/', f'{page}.html') if url else f'{page}.html'}{anchor or ''})"

    return LINK.sub(link, markdown)


def write_install_cells() -> None:
    """Write `install_cell` into the scripts."""
    for script in scripts():
        text = script.read_text(encoding="utf-8")
        marker = "# %%\n"
        before, _, rest = text.partition(marker)
        _, second, after = rest.partition("\n\n# %%")
        cell = install_cell(script.stem, install.source())
        script.write_text(f"{before}{marker}{cell}{second}{after}", encoding="utf-8")


if __name__ == "__main__":
    write_install_cells()
