"""The model card (README.md with a YAML head) of an exported folder, in the form of the Hugging Face Hub."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dipole.core.objectives.objective import entry_of
from dipole.core.objectives.objective import objective as build_objective
from dipole.core.utils.errors import DipoleError
from dipole.core.utils.files import atomic_write
from dipole.core.utils.text import counted

NAME = "README.md"
NO_LICENCE = "unknown"  # the Hub's word for a model whose owner has not chosen one
SHOWN_WIDTH = 8  # terms are looked up, and nothing is computed with them


@dataclass(frozen=True)
class Card:
    """Description of an exported folder, for its model card.

    Args:
        what: a sentence on the model.
        usage: Python that uses it, with FOLDER for the folder.
        pipeline: the Hub's task, such as "image-feature-extraction". library: name of the library that loads it.
            tags: further tags.
        notes: further information, as paragraphs.
        measured: the first results of the card's header, in the format that the Hub expects for such models.
    """

    what: str
    usage: str
    pipeline: str
    library: str = ""
    tags: tuple[str, ...] = ()
    notes: str = ""
    measured: tuple[tuple[str, str], ...] = ()


def write_card(folder: Path, card: Card, record: Any, data: dict[str, Any]) -> None:
    """Write README.md into a folder: licence, data, objective with formula and source, results, how to use it.

    Args:
        folder: an exported one. card: see `Card`. record: the run's `RunRecord`. data: as `Adapter.data_info` says.
    """
    atomic_write(folder / NAME, f"---\n{_head(card, record, data)}---\n{_body(card, record, data)}")


def set_licence(folder: Path, licence: str) -> None:
    """Write a licence into the card of a folder, if it has a card."""
    path = folder / NAME
    if path.is_file():
        text = path.read_text(encoding="utf-8")
        atomic_write(path, re.sub(r"(?m)^license: .*$", f"license: {_yaml(licence)}", text, count=1))


def _yaml(value: Any) -> str:
    """Return a value as one line of YAML. Plain words need no quotes."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w.-]*", value):
        return value
    return json.dumps(value)


def _head(card: Card, record: Any, data: dict[str, Any]) -> str:
    name = str(data.get("name", "unknown"))
    lines = [f"license: {NO_LICENCE}"]
    if card.library:
        lines.append(f"library_name: {_yaml(card.library)}")
    lines.append(f"pipeline_tag: {_yaml(card.pipeline)}")
    lines.append("tags:")
    lines += [f"- {_yaml(tag)}" for tag in ("contrastive-learning", "self-supervised", "dipole", *card.tags)]
    if name.startswith("hub:"):
        lines += ["datasets:", f"- {_yaml(name.removeprefix('hub:'))}"]
    measured = [*card.measured, *_measured(record)]
    if measured:
        lines += ["model-index:", f"- name: {_yaml(str(record.name))}", "  results:"]
        lines += [f"  - task: {{type: {_yaml(card.pipeline)}}}"]
        lines += [f"    dataset: {{name: {json.dumps(name)}, type: {json.dumps(name.removeprefix('hub:'))}}}"]
        lines += ["    metrics:"]
        for title, value in measured:
            lines.append(
                f"    - {{type: {json.dumps(title.rpartition('/')[2])}, name: {json.dumps(title)}, value: {value!r}}}"
            )
    return "\n".join(lines) + "\n"


def _body(card: Card, record: Any, data: dict[str, Any]) -> str:
    sizes = ", ".join(f"{key} {value}" for key, value in data.get("sizes", {}).items())
    results = "\n".join(f"| {title} | {value:.4f} |" for title, value in _measured(record))
    table = f"\n| measured | value |\n|---|---|\n{results}\n" if results else ""
    notes = f"\n{card.notes.strip()}\n" if card.notes else ""
    return f"""# {record.name}

{card.what} Trained with dipole on {data.get("name")} ({sizes}), objective `{record.objective}`, seed {record.seed},
{counted(record.epochs, "epoch")}.

```python
{card.usage.strip()}
```
{notes}
## Objective

{_objective(str(record.objective))}

## Results
{table}
Data fingerprint (sha256): `{data.get("fingerprint")}`. Versions: {json.dumps(record.versions)}. Run: `{record.hash}`.

## Licence

The head of this file names the licence of these weights ("{NO_LICENCE}" until their owner chooses one). What they were
trained on has a licence of its own; code files in this folder are dipole's, under the MIT licence.
"""


def _measured(record: Any) -> Iterator[tuple[str, float]]:
    for title, value in record.results.items():
        if value is not None and math.isfinite(value):
            yield title, float(value)


def _objective(text: str) -> str:
    """Return each term with its formula and source, or the text alone if it cannot be built here."""
    if text == "none":
        return "None: a control without contrast."
    try:
        terms = [(weight, entry_of(term)) for _, weight, term in build_objective(text, dim=SHOWN_WIDTH)]
    except DipoleError:
        return f"`{text}`"
    return "\n".join(f"* {weight:g} x `{entry.name}`: {entry.formula} ({entry.source})" for weight, entry in terms)
