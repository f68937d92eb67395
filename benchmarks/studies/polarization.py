"""When does polarization help, and when does it outweigh InfoNCE? Reduction, lambda, margin and number of negatives.

    python -m dipole.benchmarks.studies.polarization [--out benchmarks/results/polarization.json]
        [--domains vision,text] [--cifar10 FOLDER] [--seeds 5] [--pictures docs/pictures] [--table]

InfoNCE with default options and the same with distance polarization beside it, in one layout a domain of
`learning_everywhere`: digits with random colours, the topics of pydoc, observations of the dot task; and CIFAR-10, of
which FOLDER holds cifar10_train.npz and cifar10_test.npz, with the encoder of `dipole bench cifar10-learning`.
Everything but what is studied stays the same; a setting is compared with InfoNCE on the same seeds and the same batch
size by a paired t-test (Holm over the settings of a domain). Beside the number after training stands how hard each of
the two pulls: the length of the gradient of lambda R over that of InfoNCE, at the first step and at the last. What is
finished is not run again; the file says on which machine and with which versions each domain was run.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from dipole.benchmarks.report.curve_charts import Line, LineChart
from dipole.benchmarks.report.drawing import to_files
from dipole.benchmarks.statistics import PairedTest, difference, holm, summarize
from dipole.benchmarks.studies.learning_everywhere import LAYOUTS, Layout, Trial
from dipole.core.objectives.objective import objective
from dipole.core.record import hardware, library_versions
from dipole.core.train.recipe import read_recipe
from dipole.core.utils.errors import DataError
from dipole.core.utils.files import atomic_write

DOMAINS = {"cifar10": "", "vision": "simclr", "text": "window", "rl": "agent"}
TITLES = {"cifar10": "CIFAR-10", "vision": "Digits", "text": "Sentences", "rl": "An agent's encoder"}
MEASURES = {
    "cifar10": "kNN accuracy",
    "vision": "accuracy with five labels per class",
    "text": "mean reciprocal rank of the next sentence",
    "rl": "own observation found among 300",
}
TERM = "dp"
LAMBDA, MARGIN = 0.1, (0.1, 0.5)
"""The paper's (LMCL Sec. 5)."""
LAMBDAS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
MARGINS = ((0.0, 0.5), (0.1, 0.3), (0.25, 0.5), (0.1, 0.9))
BATCHES = (16, 64, 256)
CIFAR_BATCH = 128
FILES = {"source": "train", "test": "test"}


@dataclass(frozen=True)
class Setting:
    """What is trained: polarization with these options beside InfoNCE, or InfoNCE alone; batch None is the layout's."""

    weight: float = LAMBDA
    reduction: str = "anchor_sum"
    margin: tuple[float, float] = MARGIN
    batch: int | None = None

    @property
    def term(self) -> str:
        """The regularizer as text."""
        low, high = self.margin
        return f"{self.weight:g}*{TERM}(delta_pos={low:g}, delta_neg={high:g}, reduction={self.reduction})"

    @property
    def key(self) -> str:
        """Its name in the file of results."""
        return (f"batch {self.batch}: " if self.batch else "") + ("infonce" if self.weight == 0 else f"+ {self.term}")

    @property
    def base(self) -> "Setting":
        """InfoNCE alone at its batch size."""
        return Setting(weight=0.0, batch=self.batch)


def settings() -> Iterator[Setting]:
    """All of them, what the rest is compared with first."""
    yield Setting(weight=0.0)
    yield from (Setting(weight=weight) for weight in LAMBDAS)
    yield Setting(reduction="mean")
    for batch in BATCHES:
        yield from (Setting(weight=0.0, batch=batch), Setting(batch=batch), Setting(reduction="mean", batch=batch))
    yield from (Setting(margin=margin) for margin in MARGINS)


def layout_of(domain: str, cifar10: Path | None = None) -> Layout:
    """How a domain is trained; CIFAR-10 as the small scale of `cifar10-learning` has it, with four epochs' steps.

    Raises:
        DataError: CIFAR-10 is asked for without its folder.
    """
    if domain != "cifar10":
        return LAYOUTS[DOMAINS[domain]]
    if cifar10 is None:
        raise DataError("cifar10 needs --cifar10 FOLDER with cifar10_train.npz and cifar10_test.npz.")
    recipe: dict[str, Any] = read_recipe("cifar10-simclr")["vision"]
    table = recipe | {
        "data": {name: str(cifar10 / f"cifar10_{part}.npz") for name, part in FILES.items()},
        "encoder": recipe["encoder"] | {"width": 16},
        "augment": recipe["augment"] | {"size": 24},
        "probe": {"probes": ["knn"]},
    }
    return Layout("vision", table, "knn/accuracy", 312, CIFAR_BATCH, 2e-3, classes=10)


class Pull:
    """Length of the gradient of lambda R over that of InfoNCE, at the first step and at the last."""

    def __init__(self, setting: Setting, steps: int) -> None:
        self.setting, self.steps = setting, steps
        self.found: list[float] = []

    def __call__(self, step: int, embedded: Any, parameters: list[torch.nn.Parameter]) -> None:
        if step in (0, self.steps - 1):
            base, term = (self._length(text, embedded, parameters) for text in ("infonce", self.setting.term))
            self.found.append(term / base)

    def _length(self, text: str, embedded: Any, parameters: list[torch.nn.Parameter]) -> float:
        loss = objective(text)(embedded).loss
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        return float(torch.stack([g.norm() for g in gradients if g is not None]).norm())


def measure(trial: Trial, setting: Setting) -> dict[str, float]:
    """One training: the layout's number before and after it, and the pull of polarization."""
    pull = Pull(setting, trial.layout.steps) if setting.weight else None
    before, after = trial.train("infonce" + (f" + {setting.term}" if setting.weight else ""), pull)
    found = {"untrained": before, "trained": after}
    if pull is not None:
        found |= dict(zip(("first pull", "last pull"), pull.found, strict=True))
    return {name: float(f"{value:.5g}") for name, value in found.items()}


Found = dict[str, dict[str, dict[str, dict[str, float]]]]
"""Domain -> key of a setting -> seed -> numbers."""
Made = dict[str, list[dict[str, str]]]
"""Domain -> the machines, and versions of libraries, that it was run with."""


def trained(found: Found, domain: str, setting: Setting) -> dict[int, float]:
    """The number after training by seed."""
    return {int(seed): cell["trained"] for seed, cell in found[domain].get(setting.key, {}).items()}


def tests(found: Found, domain: str) -> dict[str, tuple[Setting, PairedTest, float]]:
    """Every setting of a domain against InfoNCE: the paired test, and p among all of them (Holm)."""
    pairs = [(s, trained(found, domain, s.base), trained(found, domain, s)) for s in settings() if s.weight]
    tested = [(s, difference(base, ours)) for s, base, ours in pairs if len(base.keys() & ours.keys()) > 1]
    adjusted = holm([test.p_t for _, test in tested])
    return {s.key: (s, test, p) for (s, test), p in zip(tested, adjusted, strict=True)}


def table(found: Found, domain: str) -> str:
    """Markdown: number, gain over InfoNCE with its 95 % interval, p (Holm), and the pull at the first and last step."""
    lines = [
        f"| beside InfoNCE | {MEASURES[domain]} | InfoNCE | gain | 95 % interval | p (Holm) | first pull | last pull |",
        "|---" * 8 + "|",
    ]
    for key, (setting, test, p) in tests(found, domain).items():
        cells = found[domain][key].values()
        ours, base = (fmean(trained(found, domain, s).values()) for s in (setting, setting.base))
        first, last = (fmean(cell[name] for cell in cells) for name in ("first pull", "last pull"))
        lines.append(
            f"| `{key}` | {ours:.3f} | {base:.3f} | {test.difference:+.3f} | {test.low:+.3f} to {test.high:+.3f} | "
            f"{p:.2g} | {first:.2g} | {last:.2g} |"
        )
    return "\n".join(lines)


AXES = {
    "lambda": "lambda (anchor_sum)",
    "batch": "instances in a batch (lambda = 0.1)",
    "margin": "width of the margin (lambda = 0.1)",
}
LINES = {"anchor_sum": "sum over instances (anchor_sum)", "mean": "mean over instances (mean)"}


def charts(found: Found) -> dict[str, LineChart]:
    """By domain the gain over lambda, over the instances of a batch by reduction, and over the margin's width.

    And how hard polarization pulls over each, all domains in one chart.
    """
    drawn: dict[str, LineChart] = {}
    for name, axis in AXES.items():
        is_log = name != "margin"
        for domain in found:
            of = {reduction: points(name, domain, reduction) for reduction in LINES}
            gains = [
                _line(LINES[reduction], [(x, _gains(found, domain, s)) for x, s in settings])
                for reduction, settings in of.items()
            ]
            drawn[f"polarization-{name}-{domain}"] = LineChart(
                f"{TITLES[domain]}: gain over InfoNCE", axis, f"gain in {MEASURES[domain]}",
                [line for line in gains if line.x], is_log=is_log,
            )  # fmt: skip
        pulls = [_line(TITLES[d], [(x, _pulls(found, d, s)) for x, s in points(name, d, "anchor_sum")]) for d in found]
        drawn[f"polarization-{name}-pull"] = LineChart(
            "How hard polarization pulls at the first step", axis, "gradient of lambda R over that of InfoNCE",
            [line for line in pulls if line.x], is_log=is_log, is_log_y=True,
        )  # fmt: skip
    return drawn


def points(name: str, domain: str, reduction: str) -> list[tuple[float, Setting]]:
    """The settings of a curve and where they stand on its axis; of margins of one width the one further out counts."""
    if name == "batch":
        own = CIFAR_BATCH if domain == "cifar10" else LAYOUTS[DOMAINS[domain]].batch_size
        found = [(float(batch or own), Setting(batch=batch, reduction=reduction)) for batch in (*BATCHES, None)]
    elif reduction == "mean":
        return []
    elif name == "lambda":
        found = [(weight, Setting(weight=weight)) for weight in LAMBDAS]
    else:
        found = [(round(high - low, 3), Setting(margin=(low, high))) for low, high in (MARGIN, *MARGINS)]
    return sorted(found, key=lambda point: point[0])


def _gains(found: Found, domain: str, setting: Setting) -> list[float]:
    """The gain over InfoNCE at that batch size, by seed."""
    ours, base = trained(found, domain, setting), trained(found, domain, setting.base)
    return [ours[seed] - base[seed] for seed in sorted(ours.keys() & base.keys())]


def _pulls(found: Found, domain: str, setting: Setting) -> list[float]:
    return [cell["first pull"] for cell in found[domain].get(setting.key, {}).values()]


def _line(label: str, points: Sequence[tuple[float, Sequence[float]]]) -> Line:
    """Means with their 95 % intervals, of points that have two values."""
    shown = [(x, summarize(values)) for x, values in points if len(values) > 1]
    means, lows, highs = ([getattr(s, part) for _, s in shown] for part in ("mean", "low", "high"))
    return Line(label, [x for x, _ in shown], means, lows, highs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/polarization.json"))
    parser.add_argument("--domains", help="default: all, cifar10 if its folder is given")
    parser.add_argument("--cifar10", type=Path, metavar="FOLDER", help="cifar10_train.npz and cifar10_test.npz")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--pictures", type=Path, help="folder for the curves as SVG")
    parser.add_argument("--table", action="store_true", help="print what is known and run nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found, made = kept(arguments.out) if arguments.out.is_file() else ({}, {})
    known = [domain for domain in DOMAINS if domain != "cifar10" or arguments.cifar10 is not None]
    domains = arguments.domains.split(",") if arguments.domains else known
    if not arguments.table:
        with tempfile.TemporaryDirectory() as folder:
            for domain in domains:
                layout = layout_of(domain, arguments.cifar10)
                for seed in range(arguments.seeds):
                    run(found, made, domain, layout, seed, Path(folder), arguments.out)
    for domain in domains:
        if domain in found:
            print(table(found, domain), end="\n\n")
    if arguments.pictures is not None:
        for name, chart in charts(found).items():
            atomic_write(arguments.pictures / f"{name}.svg", to_files(chart)[".svg"])


def kept(path: Path) -> tuple[Found, Made]:
    """What was measured, and where each domain was."""
    whole = json.loads(path.read_text(encoding="utf-8"))
    made = whole.pop("made", {})
    return {domain: whole[domain] for domain in DOMAINS if domain in whole}, made


def run(found: Found, made: Made, domain: str, layout: Layout, seed: int, folder: Path, out: Path) -> None:
    """Everything of one domain and seed that is missing, kept after each training."""
    trials: dict[int | None, Trial] = {}
    for setting in settings():
        cells = found.setdefault(domain, {}).setdefault(setting.key, {})
        if str(seed) in cells:
            continue
        if setting.batch not in trials:
            trials[setting.batch] = Trial(replace(layout, batch_size=setting.batch or layout.batch_size), seed, folder)
        cells[str(seed)] = measure(trials[setting.batch], setting)
        print(domain, seed, setting.key, cells[str(seed)], flush=True)
        machine = hardware(torch.device("cpu"), 1)
        here = {"device": machine.device_name, "machine": machine.machine, **library_versions()}
        made[domain] = made.get(domain, []) + ([here] if here not in made.get(domain, []) else [])
        atomic_write(out, json.dumps({"made": made, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
