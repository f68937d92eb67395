"""When does CLLR's projection lower the dimension? Vary loss, features, alpha and solver on three data sets.

    python -m dipole.benchmarks.studies.cllr [--data DATA] [--runs runs] [--only digits]
        [--out benchmarks/results/cllr-dimension.json]

Finished runs are not repeated, and unfinished ones resume from their checkpoint. The results are written after every
run. The study trains on digits, and with --data (a folder with cifar10/, imdb_or_movie/ and senteval/) on CIFAR-10 and
sentences. Accuracy is that of a linear probe on L Phi(x), for classes, or for SUBJ with sentences.
"""

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from dipole.benchmarks.studies.common import grouped, load, markdown, mean_and_interval, run_missing
from dipole.benchmarks.studies.learning_text import link_corpus
from dipole.core.objectives.regularizers.cllr import survives_above
from dipole.core.record import RunRecord
from dipole.core.train.recipe import load as configured
from dipole.core.train.run import train

LOSSES = {"cosine": "infonce(temperature=0.5)", "dot": "infonce(similarity=dot, temperature=1)"}
NUMBERS = (
    "rank", "columns", "effective_rank", "norm", "frobenius", "spectral", "from_identity", "error", "energy",
    "data_rank", "data_effective_rank",
)  # fmt: skip
"""Diagnostics `cllr.*` in the results."""


@dataclass(frozen=True)
class Case:
    """A row: a loss with CLLR's options and weight. Without `options` it is the loss alone."""

    loss: str
    options: str | None = None
    weight: float = 0.1
    set: tuple[str, ...] = ()
    seeds: int = 1

    @property
    def objective(self) -> str:
        if self.options is None:
            return LOSSES[self.loss]
        return f"{LOSSES[self.loss]} + {self.weight:g}*cllr({self.options})"

    @property
    def name(self) -> str:
        return " ".join((self.objective, *self.set))


@dataclass(frozen=True)
class DataSet:
    """A recipe with settings, the metric of its accuracy, and the rows."""

    recipe: str
    metric: str
    set: tuple[str, ...]
    cases: tuple[Case, ...]


def unit(alpha: float, norm: str = "nuclear", more: str = "") -> str:
    return f"norm={norm}, features=unit, alpha={alpha:g}{more}"


PAPER = ("norm=l21", "norm=nuclear")
SHORT = ("train.epochs=20", "train.batch_size=256")
SGD = ("train.optimizer=sgd", "train.learning_rate=0.1")

DIGITS = (
    Case("cosine", seeds=3),
    Case("cosine", PAPER[0]),
    Case("cosine", PAPER[0], set=SHORT),
    Case("cosine", PAPER[1]),
    Case("cosine", "norm=nuclear, alpha=1"),
    Case("cosine", "norm=nuclear, alpha=0.1"),
    Case("cosine", unit(0.02)),
    Case("cosine", unit(0.05)),
    Case("cosine", unit(0.1), seeds=3),
    Case("cosine", unit(0.2)),
    Case("cosine", unit(0.5)),
    *(Case("cosine", unit(alpha, "l21")) for alpha in (0.02, 0.05, 0.1)),
    Case("cosine", unit(0.1), weight=1.0),
    *(Case("cosine", unit(0.1, norm, ", solver=proximal")) for norm in ("nuclear", "l21")),
    *(Case("cosine", unit(0.1, more=more), set=SGD) for more in ("", ", solver=proximal")),
    Case("dot"),
    *(Case("dot", norm) for norm in PAPER),
    Case("dot", "norm=l21, alpha=1"),
    Case("dot", "norm=nuclear, alpha=1"),
    Case("dot", "norm=nuclear, alpha=0.3"),
)
CIFAR = (
    Case("cosine"),
    Case("cosine", PAPER[1]),
    Case("cosine", unit(0.05)),
)
SENTENCES = (
    Case("cosine"),
    Case("cosine", PAPER[1]),
    Case("cosine", unit(0.02)),
    Case("cosine", unit(0.05)),
    Case("cosine", unit(0.05, "l21")),
    Case("dot"),
    Case("dot", PAPER[1]),
    Case("dot", "norm=nuclear, alpha=1"),
)
PROBE = ("vision.probe.baselines=false", "vision.probe.features=embedding", 'vision.probe.probes=["linear"]')


def data_sets(data: Path | None, runs: Path) -> dict[str, DataSet]:
    """Return the data sets by name. Data sets with files need the folder `data`."""
    digits = (*PROBE, "train.batch_size=64", "train.epochs=60", "train.checkpoint_every=60")
    found = {"digits": DataSet("digits-simclr", "linear/accuracy", digits, DIGITS)}
    if data is None:
        return found
    cifar = (
        *PROBE, f"vision.data.source={data / 'cifar10/cifar10_train.npz'}",
        f"vision.data.test={data / 'cifar10/cifar10_test.npz'}", "vision.data.limit=4000", "vision.augment.size=24",
        "vision.encoder.width=16", "train.batch_size=32", "train.epochs=8",
    )  # fmt: skip
    found["CIFAR-10"] = DataSet("cifar10-simclr", "linear/accuracy", cifar, CIFAR)
    sentences = (
        f"text.corpus={link_corpus(data, 'reviews', runs)}", f"text.cache={runs / 'corpora/encoded'}",
        "text.lower=true", "text.word_size=100",
        "text.vocabulary_size=20000", f"text.senteval={data / 'senteval'}", 'text.tasks=["SUBJ"]', "train.epochs=",
        "train.steps=1000", "train.batch_size=200",
    )  # fmt: skip
    found["sentences"] = DataSet("pydoc-bow", "senteval/SUBJ/accuracy", sentences, SENTENCES)
    return found


def measurements(record: RunRecord, metric: str) -> dict[str, Any]:
    """Return the numbers of a record that the table shows."""
    numbers = {name: record.diagnostics.get(f"cllr.{name}") for name in NUMBERS}
    numbers |= {"all_rank": record.diagnostics["rank"], "all_effective_rank": record.diagnostics["effective_rank"]}
    found = {name: float(f"{value:.4g}") for name, value in numbers.items() if value is not None}
    accuracy = record.results[metric]
    assert accuracy is not None
    return {
        "objective": record.objective, "seed": record.seed, "accuracy": round(100 * accuracy, 2), **found,
        "notes": [note.partition(":")[2].partition("(")[0].strip() for note in record.notes],
        "steps": record.steps, "seconds": round(record.wall_seconds, 1),
    }  # fmt: skip


def table(results: dict[str, Any], name: str, data_set: DataSet) -> str:
    """Return a Markdown table of means over the seeds: the properties of L and the accuracy of L Phi.

    "at most" is energy / (0.65 alpha), which bounds the number of directions of L with the nuclear norm.
    """
    rows, found = [], grouped(results)
    for case in data_set.cases:
        runs = found.get(f"{name}/{case.name}", [])
        if not runs:
            continue
        mean = {
            key: fmean([run[key] for run in runs if key in run] or [0.0]) for key in (*NUMBERS, "all_effective_rank")
        }
        cells, bound = [case.loss, "none", *[""] * 6], ""
        if case.options is not None:
            options = ", ".join((case.options, *case.set)).replace("train.", "")
            if case.weight != 0.1:
                options = f"lambda {case.weight:g}, {options}"
            if "nuclear" in case.options:
                alpha = float(case.options.partition("alpha=")[2].partition(",")[0] or 10)
                bound = f"{mean['energy'] / survives_above(alpha):.1f}"
            cells = [
                case.loss, options, f"{mean['energy']:.2g}", bound, f"{mean['rank']:.0f}",
                f"{mean['effective_rank']:.1f}", f"{mean['spectral']:.2f}", f"{mean['error']:.2f}",
            ]  # fmt: skip
        rows.append([*cells, f"{mean['all_effective_rank']:.1f}", mean_and_interval([run["accuracy"] for run in runs])])
    head = ("loss", "CLLR", "energy", "at most", "rank of L", "effective", "longest", "error", "L Phi: effective",
            "accuracy")  # fmt: skip
    return markdown(head, rows)


def run(data_set: DataSet, case: Case, seed: int, folder: Path) -> dict[str, Any]:
    """Train a row of the table, or read its finished run."""
    settings = [*data_set.set, *case.set, f"objective={case.objective}", f"seed={seed}", "device=cpu"]
    return measurements(train(configured(data_set.recipe, settings).config, folder, quiet=True), data_set.metric)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with cifar10/, imdb_or_movie/ and senteval/")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of all runs")
    parser.add_argument("--only", nargs="+", help="names of data sets: digits, CIFAR-10, sentences")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cllr-dimension.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = data_sets(arguments.data, arguments.runs)
    if arguments.only is not None:
        if unknown := set(arguments.only) - chosen.keys():
            raise SystemExit(f"unknown data sets {sorted(unknown)}. Choose from {', '.join(chosen)}")
        chosen = {name: each for name, each in chosen.items() if name in arguments.only}
    content = load(arguments.out, {"runs": {}})
    content["settings"] = {name: [text for text in each.set if "/" not in text] for name, each in chosen.items()}
    todo = {
        f"{name}/{case.name}/{seed}": partial(run, each, case, seed, arguments.runs)
        for name, each in chosen.items()
        for case in each.cases
        for seed in range(case.seeds)
    }
    run_missing(arguments.out, content, todo)
    for name, each in chosen.items():
        print(f"\n{name}\n\n{table(content['runs'], name, each)}")


if __name__ == "__main__":
    main()
