"""Evaluation of a vision run: probes on frozen features, retrieval on pairs, and the picture of a query."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dipole.core.evaluation import probes
from dipole.core.evaluation.arrays import finite_rows
from dipole.core.evaluation.probes import ProbeResult, class_tasks
from dipole.core.objectives.objective import SHARPNESS
from dipole.core.objectives.similarity import normalize
from dipole.core.train.class_blocks import BlockShape, block_losses
from dipole.core.utils.errors import DataError
from dipole.core.utils.freezing import frozen
from dipole.core.utils.seeding import Seeds
from dipole.core.utils.transfer import prefetched
from dipole.vision.augment import Augmentation, random_views
from dipole.vision.config import VisionConfig
from dipole.vision.data import Parts
from dipole.vision.decoding import Encoded
from dipole.vision.frameworks.base import Framework
from dipole.vision.frameworks.clip import CLIP
from dipole.vision.image_ops import centre
from dipole.vision.image_set import Images
from dipole.vision.pairs import PairedSet
from dipole.vision.pictures import draw_query, neighbourhood
from dipole.vision.probes import CropsConfig, OnlineProbe, Probe

CHUNK = 512  # images per forward pass
DRAWN = 1024  # images of a mini-batch in a picture, at most


@dataclass(frozen=True)
class FrameworkEvaluation:
    """Evaluates a framework on the parts of a run."""

    config: VisionConfig
    parts: Parts  # probes are tested on `test`
    size: int  # side of the views in pixels
    seed: Seeds
    device: torch.device  # of the framework
    features_device: torch.device  # of the features and probes

    @property
    def has_classes(self) -> bool:
        """Return whether there are labels for probes. Pairs of a table need none."""
        return self.config.pairs != "columns" or self.parts.train.labels is not None

    def results(self, module: Framework, objective: Any, shape: BlockShape) -> dict[str, float]:
        """Return the numbers of the probes and of retrieval. shape: of the blocks of a probe."""
        found: dict[str, float] = {}
        if self.has_classes:
            read: Callable[[Tensor], Tensor] = module.features
            if self.config.probe.features == "embedding":
                read = transformed(module.embedding, objective)
            found = self.probe(module, read, shape)
        if isinstance(self.parts.test_pairs, PairedSet):
            found |= self._retrieval(module, objective, self.parts.test_pairs)
        return found

    def probe(self, module: Framework, read: Callable[[Tensor], Tensor], shape: BlockShape) -> dict[str, float]:
        """Return the numbers of the probes on features, `read` of views (n, C, H, W). k-means is of the test part."""
        config, train, test, seed = self.config.probe, self.parts.train, self.parts.test, self.seed.probe
        train_x, test_x = (self.extract(module, read, part.images) for part in (train, test))
        data: Any = (train_x, train.labels, test_x, test.labels)
        few: dict[str, Any] = {"labels_per_class": config.labels_per_class, "draws": config.draws, "seed": seed}

        def losses() -> dict[str, float]:
            if train.labels is None or test.labels is None:
                raise DataError("the probe 'losses' needs labels. Use labelled splits or remove it")
            return block_losses(train_x, train.labels, test_x, test.labels, shape, seed)

        def linear() -> ProbeResult:
            if config.crops is not None:
                return self._probe_on_crops(module, read, config.crops)
            how = dict(vars(config.descent))
            return probes.linear_probe(*data, l2=how.pop("weight_decay") or None, seed=seed, **how)

        measure: dict[Probe, Callable[[], Any]] = {
            "linear": linear,
            "few_shot": lambda: probes.few_shot_probe(*data, **few),
            "kmeans": lambda: probes.kmeans_accuracy(*data[2:], inits=config.inits, seed=seed),
            "knn": lambda: probes.knn_probe(*data, k=config.neighbours, temperature=config.temperature),
            "mean": lambda: probes.mean_classifier(*data),
            "tasks": lambda: class_tasks(*data, solver=config.solver, epochs=config.epochs, **few),
            "losses": losses,
        }
        found: dict[str, float] = {}
        for name in config.probes:
            result = measure[name]()
            found |= result.metrics(name) if isinstance(result, ProbeResult) else named(name, result)
        return found

    def _probe_on_crops(self, module: Framework, read: Callable[[Tensor], Tensor], crops: CropsConfig) -> ProbeResult:
        """Train a linear probe on random crops of the training images, and test it on the centre of the test images."""
        train, test = self.parts.train, self.parts.test
        recipes = [crops.augment(self.size)]

        def views(epoch: int, batches: Sequence[Tensor]) -> Iterator[Tensor]:
            for place, index in enumerate(batches):
                generator = self.seed.torch("probe", "crops", epoch, place)
                yield from random_views(train.images, index, recipes, generator, self.device)

        @torch.no_grad()
        def features(epoch: int, batches: Sequence[Tensor]) -> Iterator[Tensor]:
            made = views(epoch, batches)
            if isinstance(train.images, Encoded):
                made = prefetched(made)
            yield from (read(view).flatten(1) for view in made)

        tested = self.extract(module, read, test.images, crops.centre).to(self.device)
        labels: Any = train.labels, test.labels
        descent = self.config.probe.descent
        with frozen(module):
            return probes.linear_probe_on_views(features, labels[0], tested, labels[1], descent, self.seed.probe)

    def extract(
        self, module: Framework, read: Callable[[Tensor], Tensor], images: Images, share: float = 1.0
    ) -> Tensor:
        """Return features (n, d) of the centres of images (`centre`), in evaluation mode."""
        with frozen(module):
            views = (centre(part.to(self.device), self.size, share) for part in images.split(CHUNK))
            parts = [read(view).flatten(1).float() for view in views]
        return torch.cat([part.to(self.features_device) for part in parts])

    def online_accuracy(self, module: Framework, online: OnlineProbe) -> float:
        """Return the accuracy of the online probe on the test images."""
        test = self.parts.test
        assert test.labels is not None
        with online.recorded():
            self.extract(module, module.embedding, test.images)
        return int(online.correct(test.labels.to(self.device))) / len(test)

    def _retrieval(self, module: Framework, objective: Any, pairs: PairedSet) -> dict[str, float]:
        """Find the pair of each row among all others. With captions, also classify images by their captions."""
        read = transformed(module.embedding, objective)
        first = self.extract(module, read, pairs.images)
        ids, same_kind = pairs.ids[:, :2], not pairs.captions
        if same_kind:
            one, other = "first", "second"
            second = self.extract(module, read, pairs.others[0])
        else:
            one, other = "image", "caption"
            second = self._embed_captions(module, objective, pairs.captions)
        found = named(f"retrieval/{one}_to_{other}", recall(first, second, ids, same_kind))
        found |= named(f"retrieval/{other}_to_{one}", recall(second, first, ids.flip(1), same_kind))
        test = self.parts.test
        if self.config.caption is not None and test.labels is not None and test.class_names:
            prompts = [self.config.caption.prompt.replace("{}", name) for name in test.class_names]
            captions = self._embed_captions(module, objective, prompts)
            found["zero_shot/accuracy"] = zero_shot(self.extract(module, read, test.images), captions, test.labels)
        return found

    def _embed_captions(self, module: Framework, objective: Any, captions: Sequence[str]) -> Tensor:
        assert isinstance(module, CLIP)
        read, parts = transformed(module.caption, objective), []
        with frozen(module):
            for start in range(0, len(captions), CHUNK):
                tokens = module.caption.tokens(captions[start : start + CHUNK])
                parts.append(read(*(each.to(self.device) for each in tokens)).float())
        return torch.cat(parts).to(self.features_device)

    def draw(self, path: Path, module: Framework, objective: Any, batch_size: int, when: str) -> None:
        """Write the picture of a query in a mini-batch: the same images and views in every call."""
        config, images = self.config, self.parts.pretrain.images
        generator = self.seed.torch("probe", "picture")
        index = torch.randperm(len(images), generator=generator)[: min(batch_size, DRAWN)]
        pixels = images[index].to(self.device)
        count = max(2, config.count)
        if config.probe.positives is not None:
            count = config.probe.positives + 1
        augment, read = Augmentation(config.augment), transformed(module.embedding, objective)
        views = [augment(pixels, generator) for _ in range(count)]
        with frozen(module):
            embeddings = [read(view) for view in views]
        name, (t_pos, t_neg) = "no objective", SHARPNESS
        if objective is not None:
            name, (t_pos, t_neg) = str(objective), objective.sharpness()
        title = f"{name}, {when}; weights with t_pos = {t_pos:g}, t_neg = {t_neg:g}"
        found = neighbourhood(embeddings, t_pos, t_neg)
        draw_query(views, found, path, title=title, projection=config.probe.projection, seed=self.seed.probe)


def transformed(embedding: Callable[..., Tensor], objective: Any) -> Callable[..., Tensor]:
    """Return an embedding followed by the objective's projection, if there is one."""
    if objective is None:
        return embedding
    return lambda *inputs: objective.transform(embedding(*inputs))


def named(name: str, numbers: dict[str, float]) -> dict[str, float]:
    """Return numbers as NAME/KEY."""
    return {f"{name}/{key}": value for key, value in numbers.items()}


RANKS = (1, 5, 10)


def recall(a: Tensor, b: Tensor, ids: Tensor, same_kind: bool = False) -> dict[str, float]:
    """Find a positive of every distinct query among the distinct candidates, by cosine, as COCO retrieval does.

    recall@k is the share of queries with a positive among the k nearest. Ties count as found. chance@1 is the recall@1
    of a random order. a, b: (n, d) queries and candidates, row by row. ids: (n, 2) their numbers. Rows with
    the same number have the same vector. same_kind: both columns number the same items, so the query itself does not
    count.
    """
    queries, of_query, query = _distinct(ids[:, 0])
    candidates, of_candidate, candidate = _distinct(ids[:, 1])
    f, g = _unit(a[of_query]), _unit(b[of_candidate])
    ranks, positives = [], []
    for start in range(0, queries, CHUNK):
        stop = min(start + CHUNK, queries)
        scores = f[start:stop] @ g.T
        mine = (query >= start) & (query < stop)
        right = torch.zeros_like(scores, dtype=torch.bool)
        right[query[mine] - start, candidate[mine]] = True
        if same_kind:
            itself = (ids[of_query[start:stop], 0].unsqueeze(1) == ids[of_candidate, 1]).to(scores.device)
            scores = scores.masked_fill(itself & ~right, -torch.inf)
        best = scores.masked_fill(~right, -torch.inf).amax(1, keepdim=True)
        ranks.append(1 + ((scores > best) & ~right).sum(1))
        positives.append(right.sum(1))
    rank, chance = torch.cat(ranks), torch.cat(positives).double().mean() / candidates
    return {**{f"recall@{k}": float((rank <= k).double().mean()) for k in RANKS}, "chance@1": float(chance)}


def _unit(vectors: Tensor) -> Tensor:
    return normalize(finite_rows(vectors.float(), "embeddings"))


def _distinct(numbers: Tensor) -> tuple[int, Tensor, Tensor]:
    """Return the count of distinct numbers, a row with each, and the index of each row's number."""
    values, inverse = numbers.unique(return_inverse=True)
    row = torch.zeros(len(values), dtype=torch.long)
    row[inverse] = torch.arange(len(numbers))
    return len(values), row, inverse


def zero_shot(images: Tensor, captions: Tensor, labels: Tensor) -> float:
    """Return the share of images (n, d) that are nearest, by cosine, to the caption (C, d) of their class.

    labels: (n,), -1 where missing: such images do not count.
    """
    nearest = (_unit(images) @ _unit(captions).T).argmax(1).cpu()
    return float((nearest == labels.cpu())[labels.cpu() >= 0].double().mean())
