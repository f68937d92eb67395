"""Run a tutorial cell by cell and write down what it prints and draws.

    python docs/generate/execute.py docs/tutorials/NAME.py FOLDER

FOLDER then contains cells.json and the pictures. cells.json is a list with `source`, `kind`, `alt`, `output` and
`pictures` of each cell. Pictures are NAME-CELL-FIGURE.svg for a page and .png for a notebook. Files that the tutorial
writes are in FOLDER/work.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jupytext
import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def execute(script: Path, folder: Path) -> list[dict[str, Any]]:
    """The cells of a script in the percent format with their outputs."""
    module = ModuleType("__main__")
    module.__file__ = str(script)
    sys.modules["__main__"] = module  # what cells define is found there, when it is pickled
    text, place, cells = script.read_text(encoding="utf-8"), 0, []
    for number, cell in enumerate(jupytext.read(script).cells):
        printed, pictures = io.StringIO(), []
        if cell.cell_type == "code":
            place = text.index(cell.source, place)
            lines = "\n" * text.count("\n", 0, place)  # an error then names the line of the script
            with contextlib.redirect_stdout(printed):
                exec(compile(lines + cell.source, str(script), "exec"), module.__dict__)
            for figure in map(pyplot.figure, pyplot.get_fignums()):
                pictures.append(f"{script.stem}-{number}-{figure.number}")
                for kind in ("svg", "png"):
                    figure.savefig(folder / f"{pictures[-1]}.{kind}", bbox_inches="tight")
            pyplot.close("all")
        cells.append(
            {
                "kind": cell.cell_type,
                "source": cell.source,
                "alt": cell.metadata.get("alt", ""),
                "output": printed.getvalue(),
                "pictures": pictures,
            }
        )
    return cells


if __name__ == "__main__":
    script, folder = (Path(each).resolve() for each in sys.argv[1:])
    (folder / "work").mkdir()
    os.chdir(folder / "work")
    (folder / "cells.json").write_text(json.dumps(execute(script, folder)), encoding="utf-8")
