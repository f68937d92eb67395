"""Does every objective learn in every layout? Train briefly and compare with the untrained encoder.

    python -m dipole.benchmarks.studies.learning_everywhere [--out benchmarks/results/learning-everywhere.json]
        [--layouts "moco;window"] [--objectives cacr,dcl] [--seeds 0]

The study trains every registered objective with its default options, regularizers with InfoNCE. A layout is a way in
which a domain makes pairs. The data are scikit-learn's digits with random colours, the topics of pydoc, and
observations of the dot task under uniform actions.
"""

import argparse
import copy
import functools
import itertools
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dipole.benchmarks.studies.common import load, save
from dipole.core.objectives.objective import Composite, objective
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.registry import registry
from dipole.core.objectives.similarity import normalize
from dipole.core.train.domains import adapter_class
from dipole.core.train.recipe import resolve
from dipole.core.utils.errors import DipoleError
from dipole.core.utils.seeding import Seeds, isolated, seed_everything
from dipole.rl.contrast import require_unlabelled
from dipole.rl.envs.dot import DotEnv
from dipole.rl.networks import PixelEncoder, soft_update
from dipole.vision.frameworks.cmc import halves
from dipole.vision.image_ops import centre

OBJECTIVES = {
    entry.name: f"infonce + {entry.name}" if entry.kind == "regularizer" else entry.name
    for entry in registry.entries()
    if entry.kind != "diagnostic" and entry.name != "regression"  # it has no repulsion: BYOL's predictor stands for it
} | {"cross_entropy": "cross_entropy(classes={classes})", "swav": "swav(prototypes=30)"}
# Objectives that learn the document of a sentence. Their metric is the document instead of the next sentence.
SUPERVISED = ("cross_entropy", "tuple")
# Objectives that need more steps at a lower rate on images. The first codes of swav are arbitrary.
SLOW: dict[str, dict[str, Any]] = {"swav": {"steps": 200, "rate": 1e-3}}
Watch = Callable[[int, Any, list[torch.nn.Parameter]], None]  # gets step, pairs and parameters before the update


@dataclass(frozen=True)
class StudyLayout:
    """A way to make pairs: the domain and its settings, the metric and the length of the training."""

    domain: str
    settings: dict[str, Any]
    metric: str
    steps: int
    batch_size: int
    rate: float
    classes: int = 0  # of the labels
    refused: Mapping[str, str] = field(default_factory=dict)  # objectives that cannot use it, with the error message
    otherwise: Mapping[str, str] = field(default_factory=dict)  # objectives that need other options to learn
    unlearnt: Sequence[str] = ()  # that make the encoder worse, with each of eight settings of temperature and bias


def _layouts() -> Iterator[tuple[str, StudyLayout]]:
    """Yield the layouts of layouts.toml by name."""
    found = tomllib.loads(Path(__file__).with_name("layouts.toml").read_text(encoding="utf-8"))
    for name, own in found["layouts"].items():
        base = found.get(own.pop("like", ""), {})
        settings = {**base.get("settings", {}), **own["settings"]}
        yield name, StudyLayout(**{**base, **own, "settings": settings})


LAYOUTS = dict(_layouts())
INK, GROUND = (1.0, 0.8, 0.1), (0.1, 0.1, 0.5)  # RGB


def text_of(layout: str, name: str) -> str:
    return LAYOUTS[layout].otherwise.get(name, OBJECTIVES[name])


class StudyTrial:
    """A layout, or its name in `LAYOUTS`, with the untrained encoder that every training starts from."""

    def __init__(self, layout: str | StudyLayout, seed: int, folder: Path) -> None:
        if isinstance(layout, str):
            layout = LAYOUTS[layout]
        self.layout, self.seed = layout, seed
        subject_class = _Agent if layout.domain == "rl" else _Adapted
        self.subject: _Agent | _Adapted = subject_class(layout, seed, folder)
        self.untrained: dict[str, float] = {}
        self.start = copy.deepcopy(self.subject.module.state_dict())

    def train(self, text: str, watch: Watch | None = None) -> tuple[float, float]:
        """Return the metric before and after training an objective. `watch` is called before each update.

        In the objective's text `{classes}` stands for the number of classes. Raise DipoleError if the objective cannot
        use such pairs, or if a term's note says that it would not learn.
        """
        layout, subject = self.layout, self.subject
        if layout.domain == "vision":
            layout = replace(layout, **SLOW.get(text.partition("(")[0], {}))
        metric = layout.metric
        if layout.domain == "text" and text.startswith(SUPERVISED):
            metric = "document/knn"
        subject.module.load_state_dict(self.start)
        if metric not in self.untrained:
            self.untrained[metric] = subject.measure(metric, None)
        seed_everything(self.seed)
        loss_of = objective(text.format(classes=layout.classes or 2), dim=subject.width)
        if isinstance(subject, _Agent):
            require_unlabelled(loss_of, subject.width, loss_of.positives_wanted or 1, layout.batch_size)
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
    """Train images or sentences with the adapter of their domain."""

    def __init__(self, layout: StudyLayout, seed: int, folder: Path) -> None:
        table = dict(layout.settings)
        if layout.domain == "vision" and "data" not in table:
            table["data"] = {
                key: str(coloured_digits(folder, part)) for key, part in (("source", "train"), ("test", "test"))
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

    def embedded(self) -> Iterator[Any]:
        for epoch in itertools.count():
            yield from map(self.adapter.embed, self.adapter.batches(epoch))

    def after_step(self) -> None:
        self.adapter.after_step()

    def measure(self, metric: str, loss_of: Composite | None) -> float:
        self.module.eval()
        with isolated(self.seeds.probe), torch.no_grad():
            if metric == "partner@1":
                found = partner(self.adapter)
            else:
                found = self.adapter.evaluate(loss_of)[metric]
        self.module.train()
        return float(found)


class _Agent:
    """Train an agent's encoder and its slow copy on crops of observations. The metric compares two crops of each."""

    def __init__(self, layout: StudyLayout, seed: int, folder: Path) -> None:
        self.batch_size, self.width = layout.batch_size, 50
        self.frames = observations(seed, 1500)
        seed_everything(seed)
        encoder = PixelEncoder(DotEnv(28).observation_space, self.width, 24, layers=2, filters=16)
        slow = copy.deepcopy(encoder).requires_grad_(False)
        self.module = torch.nn.ModuleDict({"encoder": encoder, "slow": slow})
        self.seed, self.draw = seed, torch.Generator()

    def crops(self, index: Tensor) -> Tensor:
        top, left = torch.randint(0, 5, (2, len(index)), generator=self.draw)
        places = zip(index, top, left, strict=True)
        return torch.stack([self.frames[i, :, t : t + 24, s : s + 24] for i, t, s in places])

    def embedded(self) -> Iterator[Pairs]:
        self.draw.manual_seed(self.seed)
        while True:
            index = torch.randperm(1200, generator=self.draw)[: self.batch_size]
            with torch.no_grad():
                keys = self.module["slow"](self.crops(index))
            yield Pairs.cross(self.module["encoder"](self.crops(index)), keys)

    @torch.no_grad()
    def after_step(self) -> None:
        soft_update([self.module["encoder"]], [self.module["slow"]], 0.05)

    @torch.no_grad()
    def measure(self, metric: str, loss_of: Composite | None) -> float:
        self.draw.manual_seed(self.seed)
        held = torch.arange(1200, 1500)
        return own_first(self.module["encoder"](self.crops(held)), self.module["encoder"](self.crops(held)))


def partner(adapter: Any) -> float:
    """Return the share of 300 test images whose half L is nearest to its own half ab."""
    light, colour = halves(centre(adapter.parts.test.images[:300], adapter.size))
    return own_first(adapter.module.light(light), adapter.module.colour(colour))


def own_first(one: Tensor, other: Tensor) -> float:
    """Return the share of rows (n, d) whose nearest row of `other` (n, d), by cosine, has the same index."""
    nearest = (normalize(one) @ normalize(other).T).argmax(1)
    return float((nearest.cpu() == torch.arange(len(one))).float().mean())


@functools.cache
def observations(seed: int, count: int) -> Tensor:
    """Return observations (count, 9, 28, 28) of the dot task, each two uniform actions after a reset."""
    env = DotEnv(28)
    env.action_space.seed(seed)
    found = []
    for number in range(count):
        env.reset(seed=seed * count + number)
        found.append([env.step(env.action_space.sample())[0] for _ in range(2)][-1])
    return torch.from_numpy(np.stack(found))


def coloured_digits(folder: Path, part: str) -> str:
    """Write scikit-learn's digits in two colours to an .npz. Three in five are for training."""
    from sklearn.datasets import load_digits

    path = folder / f"digits-{part}.npz"
    images, labels = load_digits(return_X_y=True)
    ink = images.reshape(-1, 8, 8, 1) / 16
    pixels = np.round(255 * (ink * np.array(INK) + (1 - ink) * np.array(GROUND))).astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(pixels))
    cut = 3 * len(order) // 5
    rows = {"train": order[:cut], "test": order[cut:]}[part]
    np.savez(path, images=pixels[rows], labels=labels[rows].astype(np.int64))
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/learning-everywhere.json"))
    parser.add_argument("--layouts", default=";".join(LAYOUTS), help="names, separated by ;")
    parser.add_argument("--objectives", default=",".join(OBJECTIVES))
    parser.add_argument("--seeds", default="0")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = load(arguments.out, {})
    with tempfile.TemporaryDirectory() as folder:
        for layout, seed in itertools.product(arguments.layouts.split(";"), arguments.seeds.split(",")):
            trial = StudyTrial(layout, int(seed), Path(folder))
            for name in arguments.objectives.split(","):
                cell = found.setdefault(layout, {}).setdefault(name, {})
                if seed in cell:
                    continue
                try:
                    cell[seed] = [round(value, 4) for value in trial.train(text_of(layout, name))]
                except DipoleError as error:
                    cell[seed] = str(error)
                print(layout, name, seed, cell[seed], flush=True)
                save(arguments.out, found)


if __name__ == "__main__":
    main()
