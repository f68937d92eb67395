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
import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dipole.core.contrast.objective import Composite, objective
from dipole.core.contrast.pairs import Pairs
from dipole.core.contrast.registry import registry
from dipole.core.contrast.similarity import normalize
from dipole.core.ground.errors import DipoleError
from dipole.core.ground.files import atomic_write
from dipole.core.ground.seeding import Seeds, isolated, seed_everything
from dipole.core.train.domains import adapter_class
from dipole.core.train.recipe import resolve
from dipole.rl.contrast import require_unlabelled
from dipole.rl.encoder import PixelEncoder
from dipole.rl.envs.dot import DotEnv
from dipole.vision.augment import centre

OBJECTIVES = {
    entry.name: f"infonce + {entry.name}" if entry.kind == "regularizer" else entry.name
    for entry in registry.entries()
    if entry.kind != "diagnostic"
} | {"cross_entropy": "cross_entropy(classes={classes})", "swav": "swav(prototypes=30)"}


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
        "augment": {"size": 16, "crop_scale": [0.4, 1.0], "flip": 0.0, "brightness": 0.4, "contrast": 0.4} | dict.fromkeys(GREYS, 0.0),
        "probe": {"probes": ["few_shot"]},
    }
    return Layout("vision", table | framework, "few_shot/accuracy", 100, 128, 3e-3, classes=10)


def _sentences(metric: str, **pairs: Any) -> Layout:
    table = {"corpus": "pydoc", "encoder": "bow", "word_size": 64, "held_out": 0.1}
    return Layout("text", table | pairs, metric, 200, 120, 2e-3, classes=1000)


INK, GROUND = (1.0, 0.8, 0.1), (0.1, 0.1, 0.5)  # RGB
GREYS = ("saturation", "hue", "grey", "blur")  # augmentations that are left out
LAYOUTS = {
    "simclr": _images(method="simclr"),
    "simclr, queries": _images(method="simclr", views=3, simclr={"negatives": "queries"}),
    "moco": _images(method="moco", negatives=512, moco={"momentum": 0.95}),
    "moco, queue alone": _images(method="moco", negatives=512, moco={"momentum": 0.95, "batch_negatives": False}),
    "swav": _images(method="swav"),
    "cmc": replace(_images(method="cmc"), metric="partner@1"),
    "blocks of images": _images(method="blocks"),
    "window": _sentences("next_mrr", self_logit="drop"),
    "window, zero": _sentences("next_mrr", window=2),
    "blocks of sentences": _sentences("document/knn", pairs="blocks", block_size=5),
    "agent": Layout("rl", {}, "own view@1", 200, 128, 2e-3),
}

_NO_BLOCK = "no anchor has a negative"
_NO_LABEL = "needs labels"
REFUSED: dict[tuple[str, str], str] = {}


def train(layout: Layout, text: str, seed: int, folder: Path) -> tuple[float, float]:
    """The layout's number before and after training.

    Raises:
        DipoleError: if the objective cannot look at such pairs, or would not learn from them (the note of a term).
    """
    text = text.format(classes=layout.classes or 2)
    return (_agent if layout.domain == "rl" else _adapter)(layout, text, seed, folder)


def _adapter(layout: Layout, text: str, seed: int, folder: Path) -> tuple[float, float]:
    table = dict(layout.settings)
    if layout.domain == "vision":
        table["data"] = {"source": str(coloured_digits(folder, "train")), "test": str(coloured_digits(folder, "test"))}
    recipe = {
        "name": "learning", "domain": layout.domain, "objective": text, layout.domain: table,
        "train": {"steps": layout.steps, "batch_size": layout.batch_size, "learning_rate": layout.rate},
    }  # fmt: skip
    config = resolve(recipe).config
    seeds = Seeds(seed)
    seed_everything(seeds.model)
    adapter = adapter_class(layout.domain)(
        config.settings, seed=seeds, device=torch.device("cpu"), workdir=folder, batch_size=layout.batch_size
    )
    loss_of = objective(text, dim=adapter.embedding_dim)

    def measure(contrast: Composite | None) -> float:
        adapter.module.eval()
        with isolated(seeds.probe), torch.no_grad():
            found = partner(adapter) if layout.metric == "partner@1" else adapter.evaluate(contrast)[layout.metric]
        adapter.module.train()
        return float(found)

    before = measure(None)
    parameters = [p for p in (*adapter.module.parameters(), *loss_of.parameters()) if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, layout.rate)
    for _, batch in zip(range(layout.steps), _batches(adapter), strict=False):
        _step(loss_of, adapter.embed(batch), optimizer, layout.rate)
        adapter.after_step()
    return before, measure(loss_of)


def partner(adapter: Any) -> float:
    """Share of test images whose half L is nearest to its own half ab among 300: CMC's next sentence."""
    halves = adapter.module.halves(centre(adapter.parts.test.images[:300], adapter.size))
    return own_first(adapter.module.light(halves[0]), adapter.module.colour(halves[1]))


def own_first(one: Tensor, other: Tensor) -> float:
    """Share of rows (n, d) whose nearest row of the other side, by cosine, is the one of the same number."""
    nearest = (normalize(one) @ normalize(other).T).argmax(1)
    return float((nearest.cpu() == torch.arange(len(one))).float().mean())


def _batches(adapter: Any) -> Iterable[Any]:
    epoch = 0
    while True:
        yield from adapter.batches(epoch)
        epoch += 1


def _step(loss_of: Composite, embedded: Any, optimizer: torch.optim.Optimizer, rate: float) -> None:
    outcome = loss_of(embedded)
    for name, term in outcome.terms.items():
        if term.note:
            raise DipoleError(f"{name} stays {term.note}")
    optimizer.zero_grad()
    outcome.loss.backward()
    optimizer.step()
    loss_of.after_step(rate)


def _agent(layout: Layout, text: str, seed: int, folder: Path) -> tuple[float, float]:
    """The agent's encoder and its slow copy on crops of observations; asked for an observation by another crop."""
    frames = observations(seed, 1500)
    seed_everything(seed)
    loss_of = objective(text, dim=50)
    require_unlabelled(loss_of, 50, loss_of.positives_wanted or 1, layout.batch_size)
    space = DotEnv(28).observation_space
    encoder = PixelEncoder(space, 50, 24, layers=2, filters=16)
    slow = copy.deepcopy(encoder).requires_grad_(False)
    draw = torch.Generator().manual_seed(seed)

    def crops(index: Tensor) -> Tensor:
        top, left = torch.randint(0, 5, (2, len(index)), generator=draw)
        return torch.stack([frames[i, :, t : t + 24, s : s + 24] for i, t, s in zip(index, top, left, strict=True)])

    def measure() -> float:
        held = torch.arange(1200, 1500)
        with torch.no_grad():
            return own_first(encoder(crops(held)), encoder(crops(held)))

    before = measure()
    optimizer = torch.optim.Adam([*encoder.parameters(), *loss_of.parameters()], layout.rate)
    for _ in range(layout.steps):
        index = torch.randperm(1200, generator=draw)[: layout.batch_size]
        with torch.no_grad():
            keys = slow(crops(index))
        _step(loss_of, Pairs.cross(encoder(crops(index)), keys), optimizer, layout.rate)
        with torch.no_grad():
            for behind, ahead in zip(slow.parameters(), encoder.parameters(), strict=True):
                behind.lerp_(ahead, 0.05)
    return before, measure()


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
        for layout in arguments.layouts.split(";"):
            for name in arguments.objectives.split(","):
                cell = found.setdefault(layout, {}).setdefault(name, {})
                for seed in arguments.seeds.split(","):
                    if seed in cell:
                        continue
                    try:
                        values = train(LAYOUTS[layout], OBJECTIVES[name], int(seed), Path(folder))
                        cell[seed] = [round(value, 4) for value in values]
                    except DipoleError as error:
                        cell[seed] = str(error)
                    print(layout, name, seed, cell[seed], flush=True)
                    arguments.out.parent.mkdir(parents=True, exist_ok=True)
                    atomic_write(arguments.out, json.dumps(found, indent=1) + "\n")
    print(table(found))


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown: the number untrained and after each objective, the mean over the seeds; - where it is refused."""
    names = list(dict.fromkeys(name for cells in found.values() for name in cells))
    lines = ["| | untrained | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for layout, cells in found.items():
        values = {n: [v for v in cells.get(n, {}).values() if not isinstance(v, str)] for n in names}
        start = next(each for each in values.values() if each)
        shown = [f"{np.mean([after for _, after in each]):.2f}" if each else "-" for each in values.values()]
        lines.append(f"| {layout} | {np.mean([before for before, _ in start]):.2f} | {' | '.join(shown)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
