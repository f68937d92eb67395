"""Does every objective learn in every layout? Short trainings against the untrained encoder, a number each.

    python -m dipole.benchmarks.studies.learning_everywhere [--out benchmarks/results/learning-everywhere.json]
        [--layouts moco,window] [--objectives cacr,dcl] [--seeds 0]

Every registered objective, and every regularizer beside InfoNCE, with its default options, in each way in which the
domains pair a batch: on scikit-learn's digits with random colours, on the topics of pydoc, and on what uniform actions
show of the dot task. What cannot be paired so is refused, and stands in `REFUSED` with what the error says.
"""

import argparse
import copy
import functools
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dipole.core.objectives.objective import Composite, objective
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.registry import registry
from dipole.core.objectives.similarity import normalize
from dipole.core.train.domains import adapter_class
from dipole.core.train.recipe import resolve
from dipole.core.utils.errors import DipoleError
from dipole.core.utils.files import atomic_write
from dipole.core.utils.seeding import Seeds, isolated, seed_everything
from dipole.rl.contrast import require_unlabelled
from dipole.rl.envs.dot import DotEnv
from dipole.rl.networks import PixelEncoder
from dipole.vision.image_ops import centre

OBJECTIVES = {
    entry.name: f"infonce + {entry.name}" if entry.kind == "regularizer" else entry.name
    for entry in registry.entries()
    if entry.kind != "diagnostic"
} | {"cross_entropy": "cross_entropy(classes={classes})", "swav": "swav(prototypes=30)"}


SUPERVISED = ("cross_entropy", "tuple")
"""They learn which document a sentence is from, and are asked for that instead of the next sentence."""


SLOW: dict[str, dict[str, Any]] = {"swav": {"steps": 200, "rate": 1e-3}}
"""What needs more steps at a lower rate on images: its codes mean nothing at first."""


@dataclass(frozen=True)
class Layout:
    """A way to pair a batch: the domain, what its table holds, how long it trains, and which number tells.

    classes: of the labels that its pairs carry; 0 where they carry none.
    """

    domain: str
    settings: dict[str, Any]
    metric: str
    steps: int
    batch_size: int
    rate: float
    classes: int = 0


def _images(**framework: Any) -> Layout:
    table = {
        "views": 1 if framework["method"] in ("cmc", "blocks") else 2,
        "encoder": {"name": "small-conv", "width": 8, "projector": "mlp", "hidden": 64, "dim": 64},
        "augment": {"size": 16, "crop_scale": [0.4, 1.0], "flip": 0.0, "brightness": 0.4, "contrast": 0.4}
        | dict.fromkeys(GREYS, 0.0),
        "probe": {"probes": ["few_shot"]},
    }
    return Layout("vision", table | framework, "few_shot/accuracy", 50, 128, 3e-3, classes=10)


def _sentences(metric: str, **pairs: Any) -> Layout:
    table = {"corpus": "pydoc", "encoder": "bow", "word_size": 64, "held_out": 0.1}
    return Layout("text", table | pairs, metric, 120, 120, 3e-3, classes=1000)


INK, GROUND = (1.0, 0.8, 0.1), (0.1, 0.1, 0.5)  # RGB
GREYS = ("saturation", "hue", "grey", "blur")  # augmentations that are left out
LAYOUTS = {
    "simclr": _images(method="simclr"),
    "simclr, queries": _images(method="simclr", views=3, simclr={"negatives": "queries"}),
    # He et al.: the queue alone repels. At a momentum of 0.9 that needs the queries besides (docs/vision.md).
    "moco, queue": replace(
        _images(method="moco", negatives=512, moco={"momentum": 0.99, "batch_negatives": False}), steps=120
    ),
    "moco": replace(_images(method="moco", negatives=512, moco={"momentum": 0.9, "intra_batch": True}), steps=120),
    "moco, queue and queries": replace(
        _images(method="moco", negatives=512, moco={"momentum": 0.9, "batch_negatives": False, "intra_batch": True}),
        steps=120,
    ),
    "swav": _images(method="swav"),
    "cmc": replace(_images(method="cmc"), metric="partner@1"),
    "blocks of images": _images(method="blocks", blocks={"size": 1}),
    "window": _sentences("next_mrr", self_logit="drop"),
    "window, zero": _sentences("next_mrr", window=2),
    "blocks of sentences": _sentences("document/knn", pairs="blocks", block_size=4),
    "agent": Layout("rl", {}, "own view@1", 150, 128, 2e-3),
}

_NO_BLOCK = "no anchor has a negative"
_NO_CLASSES = "needs the label of every candidate"
REFUSED = {
    ("simclr, queries", "blocks"): _NO_BLOCK,
    ("moco, queue", "blocks"): _NO_BLOCK,
    ("moco, queue and queries", "blocks"): _NO_BLOCK,
    ("moco, queue", "tuple"): _NO_CLASSES,
    ("moco", "tuple"): _NO_CLASSES,
    ("moco, queue and queries", "tuple"): _NO_CLASSES,
    ("window", "tuple"): _NO_BLOCK,
    ("agent", "tuple"): "needs labels",
    ("agent", "cross_entropy"): "needs labels",
}
"""What cannot be paired so, and what the error says: no blocks among a queue's or the queries, labels that are missing,
and no negatives where the sentences of a batch are all of one document."""
OTHERWISE = dict.fromkeys(
    [("moco, queue", "swav"), ("moco", "swav"), ("moco, queue and queries", "swav")],
    "swav(prototypes=30, temperature=0.2)",
) | {("moco, queue", "quickthoughts"): "quickthoughts(similarity=cosine)"}
"""What learns with other options than its defaults alone, and with which.

A queue holds unit vectors: dot products tell them from the keys of the batch by their length alone.
"""


def text_of(layout: str, name: str) -> str:
    """The objective as it is trained in a layout."""
    return OTHERWISE.get((layout, name), OBJECTIVES[name])


Watch = Callable[[int, Any, list[torch.nn.Parameter]], None]


class Trial:
    """A layout with its untrained encoder, which every training starts from.

    Args:
        name: of `LAYOUTS`, or a layout.
        seed: of everything random.
        folder: where data are kept between trials.
    """

    def __init__(self, name: str | Layout, seed: int, folder: Path) -> None:
        self.layout, self.seed, self.folder = LAYOUTS[name] if isinstance(name, str) else name, seed, folder
        self.subject = _Agent(self.layout, seed) if self.layout.domain == "rl" else _Adapted(self.layout, seed, folder)
        self.untrained: dict[str, float] = {}
        self.start = copy.deepcopy(self.subject.module.state_dict())

    def train(self, text: str, watch: Watch | None = None) -> tuple[float, float]:
        """The layout's number before and after training an objective, a text with {classes} for their number.

        `watch` is shown every step's number, its pairs and what is trained, before it is learnt from.

        Raises:
            DipoleError: if the objective cannot look at such pairs, or would not learn from them (a term's note).
        """
        layout, subject = self.layout, self.subject
        if layout.domain == "vision":
            layout = replace(layout, **SLOW.get(text.partition("(")[0], {}))
        supervised = layout.domain == "text" and text.startswith(SUPERVISED)
        metric = "document/knn" if supervised else layout.metric
        subject.module.load_state_dict(self.start)
        if metric not in self.untrained:
            self.untrained[metric] = subject.measure(metric, None)
        seed_everything(self.seed)
        loss_of = objective(text.format(classes=layout.classes or 2), dim=subject.width)
        subject.check(loss_of)
        parameters = [p for p in (*subject.module.parameters(), *loss_of.parameters()) if p.requires_grad]
        optimizer = torch.optim.Adam(parameters, layout.rate)
        for step, embedded in zip(range(layout.steps), subject.embedded(), strict=False):
            if watch is not None:
                watch(step, embedded, parameters)
            outcome = loss_of(embedded)
            for name, term in outcome.terms.items():
                if term.note:
                    raise DipoleError(f"{name} stays {term.note}")
            optimizer.zero_grad()
            outcome.loss.backward()
            optimizer.step()
            loss_of.after_step(layout.rate)
            subject.after_step()
        return self.untrained[metric], subject.measure(metric, loss_of)


class _Adapted:
    """Images or sentences, by their domain's adapter."""

    def __init__(self, layout: Layout, seed: int, folder: Path) -> None:
        table = dict(layout.settings)
        if layout.domain == "vision" and "data" not in table:
            table["data"] = {
                "source": str(coloured_digits(folder, "train")),
                "test": str(coloured_digits(folder, "test")),
            }
        recipe = {
            "name": "learning", "domain": layout.domain, "objective": "infonce", layout.domain: table,
            "train": {"steps": layout.steps, "batch_size": layout.batch_size, "learning_rate": layout.rate},
        }  # fmt: skip
        self.seeds = Seeds(seed)
        seed_everything(self.seeds.model)
        self.adapter: Any = adapter_class(layout.domain)(
            resolve(recipe).config.settings, seed=self.seeds, device=torch.device("cpu"), workdir=folder,
            batch_size=layout.batch_size,
        )  # fmt: skip
        self.module, self.width = self.adapter.module, self.adapter.embedding_dim

    def check(self, loss_of: Composite) -> None:
        """Pairs say by themselves what they cannot carry."""

    def embedded(self) -> Iterator[Any]:
        for epoch in itertools.count():
            yield from map(self.adapter.embed, self.adapter.batches(epoch))

    def after_step(self) -> None:
        self.adapter.after_step()

    def measure(self, metric: str, loss_of: Composite | None) -> float:
        self.module.eval()
        with isolated(self.seeds.probe), torch.no_grad():
            found = partner(self.adapter) if metric == "partner@1" else self.adapter.evaluate(loss_of)[metric]
        self.module.train()
        return float(found)


class _Agent:
    """An agent's encoder and its slow copy on crops of observations; asked for an observation by another crop of it."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self.batch_size, self.width = layout.batch_size, 50
        self.frames = observations(seed, 1500)
        seed_everything(seed)
        encoder = PixelEncoder(DotEnv(28).observation_space, self.width, 24, layers=2, filters=16)
        slow = copy.deepcopy(encoder).requires_grad_(False)
        self.module = torch.nn.ModuleDict({"encoder": encoder, "slow": slow})
        self.seed, self.draw = seed, torch.Generator()

    def check(self, loss_of: Composite) -> None:
        require_unlabelled(loss_of, self.width, loss_of.positives_wanted or 1, self.batch_size)

    def crops(self, index: Tensor) -> Tensor:
        top, left = torch.randint(0, 5, (2, len(index)), generator=self.draw)
        return torch.stack(
            [self.frames[i, :, t : t + 24, s : s + 24] for i, t, s in zip(index, top, left, strict=True)]
        )

    def embedded(self) -> Iterator[Pairs]:
        self.draw.manual_seed(self.seed)
        while True:
            index = torch.randperm(1200, generator=self.draw)[: self.batch_size]
            with torch.no_grad():
                keys = self.module["slow"](self.crops(index))
            yield Pairs.cross(self.module["encoder"](self.crops(index)), keys)

    @torch.no_grad()
    def after_step(self) -> None:
        both = zip(self.module["slow"].parameters(), self.module["encoder"].parameters(), strict=True)
        for behind, ahead in both:
            behind.lerp_(ahead, 0.05)

    @torch.no_grad()
    def measure(self, metric: str, loss_of: Composite | None) -> float:
        self.draw.manual_seed(self.seed)
        held = torch.arange(1200, 1500)
        return own_first(self.module["encoder"](self.crops(held)), self.module["encoder"](self.crops(held)))


def partner(adapter: Any) -> float:
    """Share of test images whose half L is nearest to its own half ab among 300: CMC's next sentence."""
    halves = adapter.module.halves(centre(adapter.parts.test.images[:300], adapter.size))
    return own_first(adapter.module.light(halves[0]), adapter.module.colour(halves[1]))


def own_first(one: Tensor, other: Tensor) -> float:
    """Share of rows (n, d) whose nearest row of the other side, by cosine, is the one of the same number."""
    nearest = (normalize(one) @ normalize(other).T).argmax(1)
    return float((nearest.cpu() == torch.arange(len(one))).float().mean())


@functools.cache
def observations(seed: int, count: int) -> Tensor:
    """Observations (count, 9, 28, 28) of the dot task, each after two uniform actions from a start of its own."""
    env = DotEnv(28)
    env.action_space.seed(seed)
    found = []
    for number in range(count):
        env.reset(seed=seed * count + number)
        found.append([env.step(env.action_space.sample())[0] for _ in range(2)][-1])
    return torch.from_numpy(np.stack(found))


def coloured_digits(folder: Path, part: str) -> Path:
    """An .npz of scikit-learn's digits, ink and ground in two colours; three in five are for training."""
    path = folder / f"digits-{part}.npz"
    if not path.is_file():
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        ink = images.reshape(-1, 8, 8, 1) / 16
        pixels = np.round(255 * (ink * np.array(INK) + (1 - ink) * np.array(GROUND))).astype(np.uint8)
        order = np.random.default_rng(0).permutation(len(pixels))
        cut = 3 * len(order) // 5
        mine = order[:cut] if part == "train" else order[cut:]
        np.savez(path, images=pixels[mine], labels=labels[mine].astype(np.int64))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/learning-everywhere.json"))
    parser.add_argument("--layouts", default=";".join(LAYOUTS), help="names, with ; between them")
    parser.add_argument("--objectives", default=",".join(OBJECTIVES))
    parser.add_argument("--seeds", default="0")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        for layout, seed in itertools.product(arguments.layouts.split(";"), arguments.seeds.split(",")):
            trial = Trial(layout, int(seed), Path(folder))
            for name in arguments.objectives.split(","):
                cell = found.setdefault(layout, {}).setdefault(name, {})
                if seed not in cell:
                    try:
                        cell[seed] = [round(value, 4) for value in trial.train(text_of(layout, name))]
                    except DipoleError as error:
                        cell[seed] = str(error)
                    print(layout, name, seed, cell[seed], flush=True)
                    arguments.out.parent.mkdir(parents=True, exist_ok=True)
                    atomic_write(arguments.out, json.dumps(found, indent=1) + "\n")
    print(table(found))


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown: the number untrained and after each objective, the mean over the seeds.

    - is refused; an empty cell was not run.
    """
    names = [name for name in OBJECTIVES if any(name in cells for cells in found.values())]
    lines = ["| | " + " | ".join(found) + " |", "|---" * (len(found) + 1) + "|"]
    starts = [
        next(v[0] for c in cells.values() for v in c.values() if not isinstance(v, str)) for cells in found.values()
    ]
    lines.append("| untrained | " + " | ".join(f"{start:.2f}" for start in starts) + " |")
    for name in names:
        shown = []
        for cells in found.values():
            values = list(cells.get(name, {}).values())
            numbers = [value[1] for value in values if not isinstance(value, str)]
            shown.append(f"{np.mean(numbers):.2f}" if numbers else "-" if values else "")
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
