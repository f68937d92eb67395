"""When does polarization help InfoNCE? Vary its reduction, lambda, margin and the number of negatives.

    python -m dipole.benchmarks.studies.polarization [--out benchmarks/results/polarization.json]
        [--domains vision,text] [--cifar10 FOLDER] [--seeds 5] [--pictures docs/pictures] [--table]

The study trains InfoNCE with default options, alone and with distance polarization. It uses one layout per domain of
`learning_everywhere`. CIFAR-10 (FOLDER has cifar10_train.npz and cifar10_test.npz) uses the encoder of
`dipole bench cifar10-learning`. A paired t-test compares each setting with InfoNCE on the same seeds and batch size,
corrected by Holm over the settings of a domain. The pull is the length of the gradient of lambda R over that of
InfoNCE, at the first step and at the last. Finished trainings are not repeated. The file names the machine and the
versions of each domain.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from dipole.benchmarks.report.chart import Chart, to_files
from dipole.benchmarks.report.chart_types import Line, line_chart
from dipole.benchmarks.report.table import markdown
from dipole.benchmarks.statistics import PairedTest, difference, holm, summarize
from dipole.benchmarks.studies.common import load, save
from dipole.benchmarks.studies.learning_everywhere import LAYOUTS, StudyLayout, StudyTrial
from dipole.core.objectives.objective import objective
from dipole.core.record import hardware, library_versions
from dipole.core.train.recipe import read_recipe
from dipole.core.utils.errors import DataError
from dipole.core.utils.files import atomic_write

DOMAINS = {"cifar10": "", "vision": "simclr", "text": "window", "rl": "agent"}
TITLES = {"cifar10": "CIFAR-10", "vision": "Digits", "text": "Sentences", "rl": "An agent's encoder"}
MEASURES = {
    "cifar10": "kNN accuracy", "vision": "accuracy with five labels per class",
    "text": "mean reciprocal rank of the next sentence", "rl": "own observation found among 300",
}  # fmt: skip
TERM = "dp"
LAMBDA, MARGIN = 0.1, (0.1, 0.5)  # defaults of the paper (LMCL Sec. 5)
LAMBDAS = {"anchor_sum": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3), "mean": (0.1, 0.5, 1.0, 5.0)}
MARGINS = ((0.0, 0.5), (0.1, 0.3), (0.25, 0.5), (0.1, 0.9))
BATCHES = (16, 64, 256)
CIFAR_BATCH = 128
Found = dict[str, dict[str, dict[str, dict[str, float]]]]  # domain -> key of a setting -> seed -> numbers
Made = dict[str, list[dict[str, str]]]  # domain -> machines and library versions
AXES = {
    "lambda": "lambda", "batch": "instances in a batch (lambda = 0.1)", "margin": "width of the margin (lambda = 0.1)",
}  # fmt: skip
LINES = {"anchor_sum": "sum over instances (anchor_sum)", "mean": "mean over instances (mean)"}


@dataclass(frozen=True)
class DpSetting:
    """Options of polarization added to InfoNCE. Weight 0 is InfoNCE alone, batch None the batch size of the layout."""

    weight: float = LAMBDA
    reduction: str = "anchor_sum"
    margin: tuple[float, float] = MARGIN
    batch: int | None = None

    @property
    def term(self) -> str:
        low, high = self.margin
        return f"{self.weight:g}*{TERM}(delta_pos={low:g}, delta_neg={high:g}, reduction={self.reduction})"

    @property
    def key(self) -> str:
        name = "infonce"
        if self.weight:
            name = f"+ {self.term}"
        if self.batch is None:
            return name
        return f"batch {self.batch}: {name}"

    @property
    def base(self) -> "DpSetting":
        """InfoNCE alone at the same batch size."""
        return DpSetting(weight=0.0, batch=self.batch)


def settings() -> Iterator[DpSetting]:
    """Yield all settings. InfoNCE comes before the settings that are compared with it."""
    yield DpSetting(weight=0.0)
    for reduction, weights in LAMBDAS.items():
        yield from (DpSetting(weight=weight, reduction=reduction) for weight in weights)
    for batch in BATCHES:
        yield DpSetting(weight=0.0, batch=batch)
        yield from (DpSetting(reduction=reduction, batch=batch) for reduction in LAMBDAS)
    yield from (DpSetting(margin=margin) for margin in MARGINS)


def layout_of(domain: str, cifar10: Path | None = None) -> StudyLayout:
    """Return the layout of a domain. CIFAR-10 is like the small scale of `cifar10-learning`, four epochs long."""
    if domain != "cifar10":
        return LAYOUTS[DOMAINS[domain]]
    if cifar10 is None:
        raise DataError("cifar10 needs --cifar10 FOLDER with cifar10_train.npz and cifar10_test.npz.")
    recipe: dict[str, Any] = read_recipe("cifar10-simclr")["vision"]
    table = recipe | {
        "data": {"source": str(cifar10 / "cifar10_train.npz"), "test": str(cifar10 / "cifar10_test.npz")},
        "encoder": recipe["encoder"] | {"width": 16},
        "augment": recipe["augment"] | {"size": 24},
        "probe": {"probes": ["knn"]},
    }
    return StudyLayout("vision", table, "knn/accuracy", 312, CIFAR_BATCH, 2e-3, classes=10)


class Pull:
    """Record the length of the gradient of lambda R over that of InfoNCE, at the first step and at the last."""

    def __init__(self, setting: DpSetting, steps: int) -> None:
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


def measure(trial: StudyTrial, setting: DpSetting) -> dict[str, float]:
    """Train once. Return the metric before and after, and the pull of polarization."""
    text, pull = "infonce", Pull(setting, trial.layout.steps)
    if setting.weight:
        text += f" + {setting.term}"
    values = [*trial.train(text, pull if setting.weight else None), *pull.found]
    names = ("untrained", "trained", "first pull", "last pull")
    return {name: float(f"{value:.5g}") for name, value in zip(names, values, strict=False)}


def trained(found: Found, domain: str, setting: DpSetting) -> dict[int, float]:
    return {int(seed): cell["trained"] for seed, cell in found[domain].get(setting.key, {}).items()}


def tests(found: Found, domain: str) -> dict[str, tuple[DpSetting, PairedTest, float]]:
    """Return, by key, each setting of a domain with its paired test against InfoNCE and p after Holm."""
    pairs = [(s, trained(found, domain, s.base), trained(found, domain, s)) for s in settings() if s.weight]
    tested = [(s, difference(base, ours)) for s, base, ours in pairs if len(base.keys() & ours.keys()) > 1]
    adjusted = holm([test.p_t for _, test in tested])
    return {s.key: (s, test, p) for (s, test), p in zip(tested, adjusted, strict=True)}


def table(found: Found, domain: str) -> str:
    """Return a Markdown table of metric, gain over InfoNCE with its 95 % interval, p (Holm) and pull."""
    rows = []
    for key, (setting, test, p) in tests(found, domain).items():
        cells = found[domain][key].values()
        ours, base = (fmean(trained(found, domain, s).values()) for s in (setting, setting.base))
        first, last = (fmean(cell[name] for cell in cells) for name in ("first pull", "last pull"))
        gain, interval = f"{test.difference:+.3f}", f"{test.low:+.3f} to {test.high:+.3f}"
        pulls = f"{first:.2g}", f"{last:.2g}"
        rows.append([f"`{key}`", f"{ours:.3f}", f"{base:.3f}", gain, interval, f"{p:.2g}", *pulls])
    head = [MEASURES[domain], "InfoNCE", "gain", "95 % interval", "p (Holm)", "first pull", "last pull"]
    return markdown(["beside InfoNCE", *head], rows)


def charts(found: Found) -> dict[str, Chart]:
    """Return charts of the gain over each axis, one per domain, and of the pull over each axis for all domains."""
    drawn: dict[str, Chart | None] = {}
    for name, axis in AXES.items():
        is_log = name != "margin"
        pulls = []
        for domain in found:
            gains = [
                _line(label, [(x, _gains(found, domain, each)) for x, each in points(name, domain, reduction)])
                for reduction, label in LINES.items()
            ]
            drawn[f"polarization-{name}-{domain}"] = line_chart(
                f"{TITLES[domain]}: gain over InfoNCE", axis, f"gain in {MEASURES[domain]}",
                [line for line in gains if line.x], is_log=is_log, is_log_y=False,
            )  # fmt: skip
            pulled = [
                (x, [cell["first pull"] for cell in found[domain].get(setting.key, {}).values()])
                for x, setting in points(name, domain, "anchor_sum")
            ]
            pulls.append(_line(TITLES[domain], pulled))
        drawn[f"polarization-{name}-pull"] = line_chart(
            "How hard the sum (anchor_sum) pulls at the first step", axis, "gradient of lambda R over that of InfoNCE",
            [line for line in pulls if line.x], is_log=is_log, is_log_y=True,
        )  # fmt: skip
    return {name: chart for name, chart in drawn.items() if chart is not None}


def points(name: str, domain: str, reduction: str) -> list[tuple[float, DpSetting]]:
    """Return the settings of a line with their values on the axis, in order."""
    if name == "batch":
        default = CIFAR_BATCH
        if domain != "cifar10":
            default = LAYOUTS[DOMAINS[domain]].batch_size
        found = [(float(batch or default), DpSetting(batch=batch, reduction=reduction)) for batch in (*BATCHES, None)]
    elif name == "lambda":
        found = [(weight, DpSetting(weight=weight, reduction=reduction)) for weight in LAMBDAS[reduction]]
    elif reduction == "mean":
        return []
    else:
        found = [(round(high - low, 3), DpSetting(margin=(low, high))) for low, high in (MARGIN, *MARGINS)]
    return sorted(found, key=lambda point: point[0])


def _gains(found: Found, domain: str, setting: DpSetting) -> list[float]:
    ours, base = trained(found, domain, setting), trained(found, domain, setting.base)
    return [ours[seed] - base[seed] for seed in sorted(ours.keys() & base.keys())]


def _line(label: str, points: Sequence[tuple[float, Sequence[float]]]) -> Line:
    """Return means with 95 % intervals. Points with fewer than two values are left out."""
    shown = [(x, summarize(values)) for x, values in points if len(values) > 1]
    means, lows, highs = ([getattr(s, part) for _, s in shown] for part in ("mean", "low", "high"))
    return Line(label, [x for x, _ in shown], means, lows, highs)


def kept(path: Path) -> tuple[Found, Made]:
    """Read a results file. Return the numbers, and the machines of each domain."""
    content = load(path, {})
    made = content.pop("made", {})
    return {domain: content[domain] for domain in DOMAINS if domain in content}, made


def run(found: Found, made: Made, domain: str, layout: StudyLayout, seed: int, folder: Path, out: Path) -> None:
    """Train all missing settings of a domain and seed. Save after each."""
    trials: dict[int | None, StudyTrial] = {}
    for setting in settings():
        cells = found.setdefault(domain, {}).setdefault(setting.key, {})
        if str(seed) in cells:
            continue
        if setting.batch not in trials:
            sized = replace(layout, batch_size=setting.batch or layout.batch_size)
            trials[setting.batch] = StudyTrial(sized, seed, folder)
        cells[str(seed)] = measure(trials[setting.batch], setting)
        print(domain, seed, setting.key, cells[str(seed)], flush=True)
        machine = hardware(torch.device("cpu"), 1)
        here = {"device": machine.device_name, "machine": machine.machine, **library_versions()}
        machines = made.setdefault(domain, [])
        if here not in machines:
            machines.append(here)
        save(out, {"made": made, **found})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/polarization.json"))
    parser.add_argument("--domains", help="default: all, CIFAR-10 only with its folder")
    parser.add_argument("--cifar10", type=Path, metavar="FOLDER", help="cifar10_train.npz and cifar10_test.npz")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--pictures", type=Path, help="folder for the curves as SVG")
    parser.add_argument("--table", action="store_true", help="print the tables without training")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found, made = kept(arguments.out)
    domains = [domain for domain in DOMAINS if domain != "cifar10" or arguments.cifar10 is not None]
    if arguments.domains:
        domains = arguments.domains.split(",")
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


if __name__ == "__main__":
    main()
