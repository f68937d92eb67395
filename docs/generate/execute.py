"""Run a tutorial cell by cell and write down what it prints and draws.

    python docs/generate/execute.py docs/tutorials/NAME.py FOLDER

FOLDER then has cells.json, a list with `source`, `kind`, `output` and `pictures` of each cell, and the pictures.
"""

from __future__ import annotations

import contextlib
import io
import json
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
    cells = []
    for number, cell in enumerate(jupytext.read(script).cells):
        printed, pictures = io.StringIO(), []
        if cell.cell_type == "code":
            with contextlib.redirect_stdout(printed):
                exec(compile(cell.source, str(script), "exec"), module.__dict__)
            for figure in pyplot.get_fignums():
                pictures.append(f"{script.stem}-{number}-{figure}.svg")
                pyplot.figure(figure).savefig(folder / pictures[-1], bbox_inches="tight")
            pyplot.close("all")
        cells.append(
            {"kind": cell.cell_type, "source": cell.source, "output": printed.getvalue(), "pictures": pictures}
        )
    return cells


if __name__ == "__main__":
    script, folder = map(Path, sys.argv[1:])
    (folder / "cells.json").write_text(json.dumps(execute(script.resolve(), folder)), encoding="utf-8")
