"""Exports of all domains: networks as ONNX files, model cards, and uploads to the Hugging Face Hub.

An ONNX file is checked by onnxruntime when it is written. A card is README.md with a YAML head.
"""

import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData, get_token
from torch import Tensor, nn

from dipole.core.objectives.objective import entry_of
from dipole.core.objectives.objective import objective as build_objective
from dipole.core.utils.download import without_retry_messages
from dipole.core.utils.errors import ConfigError, DataError, DipoleError, TrainingError
from dipole.core.utils.extras import needing
from dipole.core.utils.files import atomic_write, disk_error
from dipole.core.utils.text import counted

FILE = "model.onnx"
OUTPUT = "features"
TOLERANCE = 1e-4
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"
CARD = "README.md"
NO_LICENCE = "unknown"  # the Hub's word for a model whose owner has not chosen one
SHOWN_WIDTH = 8  # terms are looked up, and nothing is computed with them


def check_onnx() -> None:
    """Raise ConfigError where the packages are missing."""
    with needing("onnx", "--to onnx"):
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401


def write_onnx(
    folder: Path, module: nn.Module, tried: Sequence[Mapping[str, Tensor]], free: Mapping[str, Sequence[str]]
) -> None:
    """Write `FILE` into a folder and check it: onnxruntime must reproduce the module's output, named `OUTPUT`.

    The module maps named tensors to one tensor, in eval mode on the CPU. `tried` are inputs of several sizes to check,
    the first at least two long where it is free. `free` names the leading axes of each input that are not fixed, such
    as ("batch", "length"). Raise TrainingError if the module cannot be written or the outputs differ, OSError if the
    disk refused.
    """
    check_onnx()
    named = {name: dict(enumerate(names)) for name, names in free.items()}
    # `torch.export` unrolls recurrent networks, which takes a hundred times as long.
    first = any(isinstance(part, nn.RNNBase) for part in module.modules())
    errors = []
    for traced in (first, not first):
        try:
            _write(folder / FILE, module, tried[0], named, traced)
            off = _off(folder / FILE, module, tried)
            break
        except Exception as error:  # torch.export, torch.onnx, onnxscript and onnxruntime have no common base
            if refused := disk_error(error):
                raise refused from error
            errors.append(error)
    else:
        cause: BaseException = errors[0]
        while cause.__cause__ is not None:  # the exporter's own errors only say how to report them
            cause = cause.__cause__
        reason = str(cause).strip().partition("\n")[0]
        raise TrainingError(f"this network cannot be written as ONNX: {type(cause).__name__}: {reason}") from errors[0]
    if not off <= TOLERANCE:
        raise TrainingError(f"{FILE} would give features that differ by {off:.2g} from the run's; it is not written.")


@torch.no_grad()
def _off(path: Path, module: nn.Module, tried: Sequence[Mapping[str, Tensor]]) -> float:
    """Return the largest difference of a file's output, divided by the module's largest output if above 1."""
    run, found = open_onnx(path), []
    for inputs in tried:
        wanted = module(**inputs)
        found.append((run(inputs) - wanted).abs().max() / wanted.abs().max().clamp_min(1))
    return float(torch.stack(found).max())  # NaN if there is one


def _write(
    path: Path, module: nn.Module, example: Mapping[str, Tensor], free: Mapping[str, Mapping[int, str]], traced: bool
) -> None:
    """Export by `torch.export`, or by tracing: `torch.export` fails on some shapes or fixes an axis that is free."""
    export = partial(torch.onnx.export, module, kwargs=dict(example), input_names=list(example), output_names=[OUTPUT])
    with (
        without_retry_messages("torch.onnx"),
        warnings.catch_warnings(action="ignore"),
        mock.patch.object(torch._C, "_jit_onnx_log", create=True),  # tracing that fails would print thousands of lines
    ):
        if traced:
            axes = {name: dict(each) for name, each in free.items()} | {OUTPUT: {0: "batch"}}
            export(f=path, dynamo=False, dynamic_axes=axes)
            return
        dims = {axis: torch.export.Dim(axis) for names in free.values() for axis in names.values()}
        shapes = {name: {place: dims[axis] for place, axis in names.items()} for name, names in free.items()}
        program = export(dynamo=True, dynamic_shapes=shapes, verbose=False)
        assert program is not None  # with dynamo there is one
        program.save(path)


def open_onnx(path: Path) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """Return the output of a file as a function of a batch, on the CPU."""
    from onnxruntime import InferenceSession

    try:
        session = InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a type for each state
        raise DataError(f"{path} cannot be read: {error}. Export it again, or fetch it (git lfs pull).") from error
    return lambda inputs: torch.from_numpy(session.run(None, {name: each.numpy() for name, each in inputs.items()})[0])


# Model cards ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Card:
    """Description of an exported folder, for its model card."""

    what: str  # a sentence on the model
    usage: str  # Python that uses it, with FOLDER for the folder
    pipeline: str  # the Hub's task, such as "image-feature-extraction"
    library: str = ""  # that loads the model
    tags: tuple[str, ...] = ()
    notes: str = ""  # paragraphs
    measured: tuple[tuple[str, str], ...] = ()  # the first results of the card's header, in the Hub's format


def write_card(folder: Path, card: Card, record: Any, data: dict[str, Any]) -> None:
    """Write README.md of a run's `RunRecord` and `Adapter.data_info`: licence, data, objective, results, usage."""
    atomic_write(folder / CARD, f"---\n{_head(card, record, data)}---\n{_body(card, record, data)}")


def public_name(data: dict[str, Any]) -> str:
    """Return the name of data sets for readers elsewhere: of a path on this machine the last part alone."""
    name = str(data.get("name", "unknown"))
    if name.startswith("hub:") and name[4:5] not in ("/", ".", "~"):
        return name
    return re.split(r"[\\/]", name.rstrip("\\/"))[-1] or "unknown"


def set_licence(folder: Path, licence: str) -> None:
    """Write a licence into the card of a folder, if it has a card."""
    path = folder / CARD
    if path.is_file():
        card = ModelCard.load(path)
        card.data.license = licence
        atomic_write(path, str(card))


def _head(card: Card, record: Any, data: dict[str, Any]) -> str:
    name = public_name(data)
    results = [
        EvalResult(card.pipeline, name.removeprefix("hub:"), name, title.rpartition("/")[2], value, metric_name=title)
        for title, value in (*card.measured, *_measured(record))
    ]
    head = ModelCardData(
        license=NO_LICENCE,
        library_name=card.library or None,
        pipeline_tag=card.pipeline,
        tags=["contrastive-learning", "self-supervised", "dipole", *card.tags],
        datasets=[name.removeprefix("hub:")] if name.startswith("hub:") else None,
        model_name=str(record.name),
        eval_results=results or None,
    )
    return head.to_yaml() + "\n"


def _body(card: Card, record: Any, data: dict[str, Any]) -> str:
    sizes = ", ".join(f"{key} {value}" for key, value in data.get("sizes", {}).items())
    results = "\n".join(f"| {title} | {value:.4f} |" for title, value in _measured(record))
    table = f"\n| measured | value |\n|---|---|\n{results}\n" if results else ""
    notes = f"\n{card.notes.strip()}\n" if card.notes else ""
    return f"""# {record.name}

{card.what} Trained with dipole on {public_name(data)} ({sizes}), objective `{record.objective}`, seed {record.seed},
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


def check_push(repo: str) -> None:
    """Raise ConfigError where a push could not even begin: no such name, no login."""
    if not re.fullmatch(r"(?:[\w.-]+/)?[\w.-]{1,96}", repo):
        raise ConfigError(f"--push {repo}: a repository is called NAME or OWNER/NAME.")
    if get_token() is None:
        raise ConfigError(f"--push {repo}: you are not logged in to the Hugging Face Hub: {LOGIN}.")


def push(folder: Path, repo: str, private: bool = False) -> str:
    """Upload a folder to a repository, OWNER/NAME or NAME, and return its address. TrainingError: the Hub refuses."""
    try:
        api = HfApi()
        made = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="Exported by dipole")
    except Exception as error:  # what carries its requests has changed between versions, and so have the errors
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise TrainingError(
            f"{folder} is written, but could not be pushed to {repo}: {reason} ({LOGIN}). "
            f"Once that is cured: hf upload {repo} {folder}"
        ) from error
    return str(made)
