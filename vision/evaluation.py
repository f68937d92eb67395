"""Evaluation of a vision run: probes on frozen features, retrieval on pairs, and the picture of a query."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dipole.core.evaluation.probes import ProbeResult, frozen, linear_probe_on_views
from dipole.core.train.block_losses import BlockShape
from dipole.core.utils.seeding import Seeds
from dipole.vision.augment import Augmentation
from dipole.vision.config import VisionConfig
from dipole.vision.data import Parts
from dipole.vision.frameworks.base import Method
from dipole.vision.frameworks.clip import CLIP
from dipole.vision.image_ops import centre
from dipole.vision.image_set import Images
from dipole.vision.online import OnlineProbe
from dipole.vision.pairs.columns import PairedSet
from dipole.vision.pictures import draw_query, neighbourhood, sharpness
from dipole.vision.probes import probe
from dipole.vision.retrieval import recall, zero_shot
from dipole.vision.views import CropFeatures

CHUNK = 512  # images per forward pass
DRAWN = 1024  # images of a mini-batch in a picture, at most


class Evaluation:
    """Evaluates a framework on the parts of a run.

    Args:
        config: the [vision] table.
        parts: the images. Probes are tested on `test`.
        size: side of the views in pixels.
        seed: of the run.
        device: of the framework.
        features_device: of the features and probes.
    """

    def __init__(
        self,
        config: VisionConfig,
        parts: Parts,
        size: int,
        seed: Seeds,
        device: torch.device,
        features_device: torch.device,
    ) -> None:
        self.config, self.parts, self.size = config, parts, size
        self.seed, self.device, self.features_device = seed, device, features_device

    @property
    def has_classes(self) -> bool:
        """Return whether there are labels for probes. Pairs of a table need none."""
        return self.config.pairs != "columns" or self.parts.train.labels is not None

    def results(self, module: Method, objective: Any, shape: BlockShape) -> dict[str, float]:
        """Return the numbers of the probes and of retrieval.

        objective: its projection is applied to the embeddings, unless it is None. shape: of the blocks of a probe.
        """
        found: dict[str, float] = {}
        if self.has_classes:
            read: Callable[[Tensor], Tensor] = module.features
            if self.config.probe.features == "embedding":
                read = transformed(module.embedding, objective)
            found = self._probe(module, read, shape)
        if isinstance(self.parts.test_pairs, PairedSet):
            found |= self._retrieval(module, objective, self.parts.test_pairs)
        return found

    def of_pixels(self, module: Method, shape: BlockShape) -> dict[str, float]:
        """Return the numbers of the probes on raw pixels."""
        return self._probe(module, lambda views: views.flatten(1), shape)

    def _probe(self, module: Method, read: Callable[[Tensor], Tensor], shape: BlockShape) -> dict[str, float]:
        train, test = self.parts.train, self.parts.test
        on_crops = None
        if self.config.probe.crops is not None:

            def on_crops() -> ProbeResult:
                return self._probe_on_crops(module, read)

        return probe(
            self.config.probe,
            self.extract(module, read, train.images),
            train.labels,
            self.extract(module, read, test.images),
            test.labels,
            self.seed.probe,
            shape,
            on_crops,
        )

    def _probe_on_crops(self, module: Method, read: Callable[[Tensor], Tensor]) -> ProbeResult:
        """Train a linear probe on random crops of the training images, and test it on the centre of the test images."""
        config, crops = self.config.probe, self.config.probe.crops
        assert crops is not None
        train, test = self.parts.train, self.parts.test
        rows = CropFeatures(train.images, crops.augment(self.size), read, self.seed, self.device)
        with frozen(module):
            tested = [
                read(centre(part.to(self.device), self.size, crops.centre)).flatten(1)
                for part in test.images.split(CHUNK)
            ]
            return linear_probe_on_views(
                rows, train.labels, torch.cat(tested), test.labels, config.descent, self.seed.probe
            )

    def extract(self, module: Method, read: Callable[[Tensor], Tensor], images: Images) -> Tensor:
        """Return a function's features (n, d) of the centres of images, in evaluation mode."""
        with frozen(module):
            parts = [read(centre(part.to(self.device), self.size)).float() for part in images.split(CHUNK)]
        return torch.cat([part.to(self.features_device) for part in parts])

    def online_accuracy(self, module: Method, online: OnlineProbe) -> float:
        """Return the accuracy of the online probe on the test images."""
        test = self.parts.test
        assert test.labels is not None
        correct = 0
        with frozen(module):
            for part, labels in zip(test.images.split(CHUNK), test.labels.split(CHUNK), strict=True):
                with online.recorded():
                    module.embedding(centre(part.to(self.device), self.size))
                correct += int(online.correct(labels.to(self.device)))
        return correct / len(test)

    def _retrieval(self, module: Method, objective: Any, pairs: PairedSet) -> dict[str, float]:
        """Find the pair of each row among all others. With captions, also classify images by their captions."""
        read = transformed(module.embedding, objective)
        first = self.extract(module, read, pairs.images)
        if pairs.captions:
            one, other = "image", "caption"
            second = self._embed_captions(module, objective, pairs.captions)
        else:
            one, other = "first", "second"
            second = self.extract(module, read, pairs.others[0])
        ids, same_kind = pairs.ids[:, :2], not pairs.captions
        directions = {
            f"retrieval/{one}_to_{other}": recall(first, second, ids, same_kind),
            f"retrieval/{other}_to_{one}": recall(second, first, ids.flip(1), same_kind),
        }
        found = {f"{name}/{key}": value for name, numbers in directions.items() for key, value in numbers.items()}
        test = self.parts.test
        if self.config.caption is not None and test.labels is not None and test.class_names:
            prompts = [self.config.caption.prompt.format(name) for name in test.class_names]
            captions = self._embed_captions(module, objective, prompts)
            found["zero_shot/accuracy"] = zero_shot(self.extract(module, read, test.images), captions, test.labels)
        return found

    def _embed_captions(self, module: Method, objective: Any, captions: Sequence[str]) -> Tensor:
        assert isinstance(module, CLIP)
        parts = []
        with frozen(module):
            for start in range(0, len(captions), CHUNK):
                tokens = module.caption.tokens(captions[start : start + CHUNK])
                parts.append(module.caption(*(each.to(self.device) for each in tokens)).float())
            z = torch.cat(parts)
            if objective is not None:
                z = objective.transform(z)
        return z.to(self.features_device)

    def draw(self, path: Path, module: Method, objective: Any, batch_size: int, when: str, query: int = 0) -> None:
        """Write the picture of a query in a mini-batch: images with their weights, and a map of the batch.

        Images and views are the same in every call. There are as many views as in training (two for CMC), or one more
        than vision.probe.positives.
        """
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
        t_pos, t_neg = sharpness(objective)
        name = "no objective" if objective is None else str(objective)
        draw_query(
            views,
            neighbourhood(embeddings, query, t_pos, t_neg),
            path,
            title=f"{name}, {when}; weights with t_pos = {t_pos:g}, t_neg = {t_neg:g}",
            query=query,
            projection=config.probe.projection,
            seed=self.seed.probe,
        )


def transformed(embedding: Callable[[Tensor], Tensor], objective: Any) -> Callable[[Tensor], Tensor]:
    """Return an embedding followed by the objective's projection, if there is one."""
    if objective is None:
        return embedding
    return lambda images: objective.transform(embedding(images))
