"""When does CLLR's projection lower the dimension? Digits, CIFAR-10 and sentences, over loss, features, alpha, solver.

    python -m dipole.benchmarks.studies.cllr [--data DATA] [--runs runs] [--only digits]
        [--out benchmarks/results/cllr-dimension.json]

Every run is one that `dipole train` makes: a finished one is not run again, an unfinished one resumes. The results are
written after every run. Without --data (a folder with cifar10/, imdb_or_movie/ and senteval/) the digits alone are
trained. Accuracy is that of a linear probe on L Phi(x): of the classes, or of the sentences' SUBJ task.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dipole.benchmarks.statistics import summarize
from dipole.benchmarks.studies.learning_text import link_corpus
from dipole.core.objectives.regularizers.cllr import survives_above
from dipole.core.record import RunRecord
from dipole.core.train.recipe import read_recipe, resolve
from dipole.core.train.run import train
from dipole.core.utils.files import atomic_write

LOSSES = {"cosine": "infonce(temperature=0.5)", "dot": "infonce(similarity=dot, temperature=1)"}
NUMBERS = (
    "rank", "columns", "effective_rank", "norm", "frobenius", "spectral", "from_identity", "error", "energy",
    "data_rank", "data_effective_rank",
)  # fmt: skip
"""What is kept of `cllr.*`."""


@dataclass(frozen=True)
class Case:
    """One row: a loss, with CLLR's options and weight, or alone where `options` is None."""

    loss: str
    options: str | None = None
    weight: float = 0.1
    set: tuple[str, ...] = ()
    seeds: int = 1

    @property
    def objective(self) -> str:
        return LOSSES[self.loss] + ("" if self.options is None else f" + {self.weight:g}*cllr({self.options})")

    @property
    def name(self) -> str:
        return " ".join((self.objective, *self.set))


@dataclass(frozen=True)
class DataSet:
    """What the rows are trained on: a recipe, settings over it, the accuracy that is read, and the rows."""

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
    """The data sets by name; those that need `data` only where it is given."""
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
    corpus = runs / "corpora" / "reviews"  # a run is known by where its corpus lies
    if not corpus.is_dir():
        link_corpus(data, "reviews", corpus)
    sentences = (
        f"text.corpus={corpus}", f"text.cache={runs / 'corpora/encoded'}", "text.lower=true", "text.word_size=100",
        "text.vocabulary_size=20000", f"text.senteval={data / 'senteval'}", 'text.tasks=["SUBJ"]', "train.epochs=",
        "train.steps=1000", "train.batch_size=200",
    )  # fmt: skip
    found["sentences"] = DataSet("pydoc-bow", "senteval/SUBJ/accuracy", sentences, SENTENCES)
    return found


def runs_of(places: dict[str, DataSet]) -> Iterator[tuple[str, DataSet, Case, int]]:
    """Every run, seed by seed."""
    for seed in range(max(case.seeds for place in places.values() for case in place.cases)):
        for name, place in places.items():
            yield from ((name, place, case, seed) for case in place.cases if seed < case.seeds)


def kept(record: RunRecord, metric: str) -> dict[str, Any]:
    """What of a record the table is made of."""
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


def mean(entries: list[dict[str, Any]], name: str) -> float | None:
    values = [entry[name] for entry in entries if name in entry]
    return sum(values) / len(values) if values else None


def accuracy(entries: list[dict[str, Any]]) -> str:
    """Mean over the seeds, with half of the 95 % t-interval where there are several."""
    summary = summarize([entry["accuracy"] for entry in entries])
    return f"{summary.mean:.1f}" + (f" +- {summary.high - summary.mean:.1f}" if len(entries) > 1 else "")


def most_directions(entries: list[dict[str, Any]], options: str) -> str:
    """The bound energy / (0.65 alpha) on the number of directions that L keeps; the nuclear norm's alone."""
    if "nuclear" not in options:
        return ""
    alpha = float(options.partition("alpha=")[2].partition(",")[0] or 10)
    return f"{(mean(entries, 'energy') or 0.0) / survives_above(alpha):.1f}"


def table(results: dict[str, Any], name: str, place: DataSet) -> str:
    """Means over the seeds, Markdown: what L has become, and what the probe says of L Phi."""
    heads = ("loss", "CLLR", "energy", "at most", "rank of L", "effective", "longest", "error", "L Phi: effective",
             "accuracy")  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for case in place.cases:
        entries = [e for key, e in results.items() if key.rpartition("/")[0] == f"{name}/{case.name}"]
        if not entries:
            continue
        cells = [case.loss, "none", *[""] * 6]
        if case.options is not None:
            weight = "" if case.weight == 0.1 else f"lambda {case.weight:g}, "
            numbers = [mean(entries, key) or 0.0 for key in ("rank", "effective_rank", "spectral", "error")]
            cells = [
                case.loss, ", ".join((weight + case.options, *case.set)).replace("train.", ""),
                f"{mean(entries, 'energy'):.2g}", most_directions(entries, case.options),
                f"{numbers[0]:.0f}", f"{numbers[1]:.1f}", f"{numbers[2]:.2f}", f"{numbers[3]:.2f}",
            ]  # fmt: skip
        cells += [f"{mean(entries, 'all_effective_rank'):.1f}", accuracy(entries)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with cifar10/, imdb_or_movie/ and senteval/")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of all runs")
    parser.add_argument("--only", nargs="+", help="names of data sets: digits, CIFAR-10, sentences")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cllr-dimension.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    places = data_sets(arguments.data, arguments.runs)
    if unknown := set(arguments.only or ()) - places.keys():
        raise SystemExit(f"there is no data set {sorted(unknown)}; there are {', '.join(places)}.")
    places = {name: place for name, place in places.items() if arguments.only is None or name in arguments.only}
    results: dict[str, Any] = json.loads(arguments.out.read_text())["runs"] if arguments.out.is_file() else {}
    for name, place, case, seed in runs_of(places):
        settings = [*place.set, *case.set, f"objective={case.objective}", f"seed={seed}", "device=cpu"]
        record = train(resolve(read_recipe(place.recipe), settings).config, arguments.runs, quiet=True)
        results[f"{name}/{case.name}/{seed}"] = kept(record, place.metric)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        shipped = {key: [s for s in each.set if "/" not in s] for key, each in places.items()}
        atomic_write(arguments.out, json.dumps({"settings": shipped, "runs": results}, indent=1) + "\n")
        print(name, seed, results[f"{name}/{case.name}/{seed}"], flush=True)
    for name, place in places.items():
        print(f"\n{name}\n\n{table(results, name, place)}")


if __name__ == "__main__":
    main()
