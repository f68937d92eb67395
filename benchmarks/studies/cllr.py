"""When does CLLR's projection lower the dimension? Vary loss, features, alpha and solver on three data sets.

    python -m dipole.benchmarks.studies.cllr [--data DATA] [--runs runs] [--only digits]
        [--out benchmarks/results/cllr-dimension.json]

Finished runs are not repeated, and unfinished ones resume from their checkpoint. The results are written after every
run. The study trains on digits, and with --data (a folder with cifar10/, imdb_or_movie/ and senteval/) on CIFAR-10 and
sentences. Accuracy is that of a linear probe on L Phi(x), for classes, or for SUBJ with sentences.
"""

import argparse
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dipole.benchmarks.studies.common import load, markdown, mean_and_interval, of_method, save
from dipole.benchmarks.studies.learning_text import link_corpus
from dipole.core.objectives.regularizers.cllr import survives_above
from dipole.core.record import RunRecord
from dipole.core.train.recipe import read_recipe, resolve
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


def mean(runs: list[dict[str, Any]], name: str) -> float:
    """Return the mean over the runs that have the number, or 0 if none has."""
    values = [run[name] for run in runs if name in run]
    if not values:
        return 0.0
    return sum(values) / len(values)


def most_directions(runs: list[dict[str, Any]], options: str) -> str:
    """Return energy / (0.65 alpha), which bounds the number of directions of L with the nuclear norm."""
    if "nuclear" not in options:
        return ""
    alpha = float(options.partition("alpha=")[2].partition(",")[0] or 10)
    return f"{mean(runs, 'energy') / survives_above(alpha):.1f}"


def table(results: dict[str, Any], name: str, data_set: DataSet) -> str:
    """Return a Markdown table of means over the seeds: the properties of L and the accuracy of L Phi."""
    rows = []
    for case in data_set.cases:
        runs = of_method(results, f"{name}/{case.name}")
        if not runs:
            continue
        cells = [case.loss, "none", *[""] * 6]
        if case.options is not None:
            options = ", ".join((case.options, *case.set)).replace("train.", "")
            if case.weight != 0.1:
                options = f"lambda {case.weight:g}, {options}"
            cells = [
                case.loss, options, f"{mean(runs, 'energy'):.2g}", most_directions(runs, case.options),
                f"{mean(runs, 'rank'):.0f}", f"{mean(runs, 'effective_rank'):.1f}", f"{mean(runs, 'spectral'):.2f}",
                f"{mean(runs, 'error'):.2f}",
            ]  # fmt: skip
        accuracy = mean_and_interval([run["accuracy"] for run in runs])
        rows.append([*cells, f"{mean(runs, 'all_effective_rank'):.1f}", accuracy])
    head = ("loss", "CLLR", "energy", "at most", "rank of L", "effective", "longest", "error", "L Phi: effective",
            "accuracy")  # fmt: skip
    return markdown(head, rows)


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
    results = load(arguments.out, {"runs": {}})["runs"]
    shipped = {name: [text for text in each.set if "/" not in text] for name, each in chosen.items()}
    most_seeds = max(case.seeds for each in chosen.values() for case in each.cases)
    for seed, (name, each) in itertools.product(range(most_seeds), chosen.items()):
        for case in each.cases:
            if seed >= case.seeds:
                continue
            settings = [*each.set, *case.set, f"objective={case.objective}", f"seed={seed}", "device=cpu"]
            record = train(resolve(read_recipe(each.recipe), settings).config, arguments.runs, quiet=True)
            key = f"{name}/{case.name}/{seed}"
            results[key] = measurements(record, each.metric)
            save(arguments.out, {"settings": shipped, "runs": results})
            print(name, seed, results[key], flush=True)
    for name, each in chosen.items():
        print(f"\n{name}\n\n{table(results, name, each)}")


if __name__ == "__main__":
    main()
