"""The theorems of the papers on a finished run: its features, its labels, what its objective and metrics say."""

from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from dipole.core.evaluation.arrays import in_range
from dipole.core.evaluation.theory.report import Report, measure
from dipole.core.evaluation.theory.theorems import Choices, RunFacts
from dipole.core.objectives.objective import Composite
from dipole.core.objectives.regularizers.cllr import CLLR
from dipole.core.objectives.regularizers.dp import DP
from dipole.core.objectives.similarity import normalize
from dipole.core.objectives.spec import Range
from dipole.core.record import RunRecord
from dipole.core.train.evaluation import transformed
from dipole.core.train.metrics import read_metrics
from dipole.core.train.model import load_run
from dipole.core.train.run_folder import RunFolder
from dipole.core.utils.errors import DataError, OptionError, ReceivedError, RecordError
from dipole.core.utils.freezing import in_mode
from dipole.core.utils.seeding import Seeds, isolated
from dipole.core.utils.text import counted

Form = Literal["auto", "raw", "unit"]


@in_range
def theory_of_run(
    folder: RunFolder,
    choices: Choices | None = None,
    *,
    device: str | None = None,
    split: Literal["train", "test"] = "test",
    labels: str = "given",
    form: Form = "auto",
    scale: Annotated[float, Range(above=0)] = 1.0,
) -> Report:
    """Return the report of `measure` on a finished run: every theorem on its features.

    Args:
        folder: the run.
        choices: options of the theorems.
        device: as `load_run`.
        split: "train" or "test" features of the domain.
        labels: "given" for the domain's labels; "blocks:N" for classes of N consecutive rows; or a file, .npy or one
            label per line.
        form: features as they are ("raw"), on the unit sphere ("unit"), or as the objective sees them ("auto": on the
            sphere where every similarity is a cosine).
        scale: features times this, > 0.

    Raises:
        RecordError: the run is not finished, or its record or metrics cannot be read.
        OptionError: an argument is out of its range.
        DataError: labels cannot be read, or are not one for each row, or features are not finite.
    """
    record, adapter, objective = load_run(folder, device)
    with in_mode(False, adapter.module, objective), isolated(Seeds(record.seed).probe), torch.no_grad():
        features, given = adapter.features(split)
        projected = features = transformed(features.float(), objective).cpu()
    seen = {term.similarity for _, _, term in objective or () if term.similarity is not None}
    if form == "unit" or (form == "auto" and seen == {"cosine"}):
        features = normalize(features)
    classes = read_labels(labels, given, len(features))
    try:
        lines = read_metrics(folder.metrics) if folder.metrics.is_file() else []
    except ReceivedError as error:
        raise RecordError(str(error)) from error
    facts = _facts(record, objective, lines)
    return measure(features * scale, classes, choices, facts=facts, metrics=lines, projected=projected)


def read_labels(text: str, given: Tensor | None, rows: int) -> Tensor | None:
    """Classes of the rows: "given", "blocks:N" or the path of a file, see `theory_of_run`."""
    if text == "given":
        return given
    if text.startswith("blocks:"):
        size = text.removeprefix("blocks:")
        if not size.isdecimal() or int(size) < 1:
            raise OptionError(f"--labels blocks:N takes N >= 1 rows as a class, got {text!r}.", "labels")
        return torch.arange(rows) // int(size)
    path = Path(text)
    try:
        if path.suffix == ".npy":
            found = np.load(path)
        else:
            written = path.read_text(encoding="utf-8")
            lines = [line.strip() for line in written.rstrip().splitlines()]  # a name may have spaces
            found = np.asarray(lines if len(lines) == rows else written.split())
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"cannot read labels from {path}: {error}. Allowed: given, blocks:N, or a file: .npy, or a label per line."
        ) from error
    if found.shape != (rows,):
        raise DataError(f"{path} has labels of shape {found.shape}, the run has {counted(rows, 'row')} of features.")
    return torch.from_numpy(_classes(found))


def _classes(names: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return integers unchanged (below 0: no label). Number other labels in order of their names, NaN as no label."""
    if names.dtype.kind not in "fiub":
        try:
            names = np.asarray([int(name) for name in names.tolist()])
        except ValueError:
            return np.unique(names, return_inverse=True)[1]
    if np.can_cast(names.dtype, np.int64):
        return names.astype(np.int64)
    codes = np.unique(names, return_inverse=True)[1]
    return np.where(names == names, codes, -1)  # NaN differs from itself


def _facts(record: RunRecord, objective: Composite | None, lines: list[dict[str, Any]]) -> RunFacts:
    found: dict[str, Any] = {"negatives": record.negatives_per_anchor}
    for name, weight, term in objective or ():
        if isinstance(term, DP):
            found |= {"dp_weight": weight, "delta_pos": term.delta_pos, "delta_neg": term.delta_neg}
            found |= {"reduction": term.reduction}
        elif isinstance(term, CLLR) and term.variant == "printed":
            found |= {"cllr_weight": weight, "alpha": term.alpha}
        elif name == "infonce":
            logged = [line.get("train/loss.infonce") for line in lines]
            losses = [loss for loss in logged if loss is not None]
            if losses:
                found["nce"] = losses[-1]
    return RunFacts(**found)
