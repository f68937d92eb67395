"""SimCLR: all views of a batch through one network."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from pydantic import Field
from torch import Tensor, nn

from dipole.core.objectives.checks import check_choice
from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.spec import check_whole
from dipole.core.train.config import Settings
from dipole.core.utils.errors import ConfigError, PairsError
from dipole.core.utils.text import counted
from dipole.core.utils.transfer import generator
from dipole.vision.frameworks.base import AnyObjective, AnyPairs, Batch, Draw, OneBranch, embedded, register_framework
from dipole.vision.frameworks.branch import Setup, in_passes
from dipole.vision.settings import VisionSettings

Repel = Literal["all", "view_pairs", "queries", "in-turn"]


class SimCLRConfig(Settings):
    """The [vision.simclr] table."""

    negatives: Repel = Field(
        "all",
        description="all: all views of the other images, (K + 1)(M - 1) of them; view_pairs: for each "
        "pair of views, the other images of the second view repel the first, M - 1 (the code of CACR's authors); "
        "queries: the first view is the query, and the other images' queries are its negatives, M - 1; in-turn: the "
        "same for each view in turn",
    )


@register_framework("simclr")
class SimCLR(OneBranch):
    """One network for all views. Negatives are the rest of the batch (Chen et al. 2020).

        >>> backbone = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, 2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1))
        >>> model = SimCLR(backbone, objective="infonce(temperature=0.5) + 0.1*dp")
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.06)
        >>> loss = model([torch.rand(8, 3, 32, 32), torch.rand(8, 3, 32, 32)])
        >>> loss.backward()
        >>> optimizer.step()
        >>> model.after_step()

    With more than two views this is the K x (1 against M) form that CACR calls CMC.

    Args:
        backbone: any module that maps images (n, C, H, W) to features (n, ...), which are flattened.
        objective: its text, an Objective or a Composite.
        head: the projection head. None is the paper's (`projection_head`), `nn.Identity()` is none.
        negatives: random negatives for each anchor, from the batch of all ranks. None uses all.
        repel: which rows of the batch are negatives, as in `SimCLRConfig`.
    """

    table = SimCLRConfig
    negatives_mean = "random ones of the batch for each anchor"
    pairs = ("augmented", "labels", "columns")

    def __init__(
        self,
        backbone: nn.Module,
        objective: AnyObjective | None,
        head: nn.Module | None = None,
        negatives: int | None = None,
        repel: Repel = "all",
    ) -> None:
        super().__init__(backbone, objective, head)
        if negatives is not None:
            check_whole("negatives", negatives)
        check_choice("repel", repel, *get_args(Repel))
        self.negatives = negatives
        self.repel: Repel = repel

    @classmethod
    def from_config(cls, config: VisionSettings, setup: Setup) -> "SimCLR":
        repel: Repel = config.own_table.negatives
        most = (setup.batch_size - 1) * (config.count if repel == "all" else 1)
        if config.negatives is not None and config.negatives > most:
            raise ConfigError(
                f"vision.negatives: a batch of {setup.batch_size} with {config.count} views has "
                f"{counted(most, 'negative')} per anchor with vision.simclr.negatives = {repel!r}, fewer than "
                f"{config.negatives}. Raise train.batch_size, or take method = 'moco' with a queue."
            )
        if config.pairs != "labels":
            return cls(setup.branch(), None, negatives=config.negatives, repel=repel)
        if repel != "all":
            raise ConfigError(
                f"vision.simclr.negatives = {repel!r} has no effect with vision.pairs = 'labels': all views of other "
                "classes repel. Remove it."
            )
        return SupCon(setup.branch(), None, negatives=config.negatives)

    @classmethod
    def sample(cls, views: int, rows: Draw, labels: Tensor | None) -> AnyPairs:
        return Pairs.from_views(rows(views).unbind(1), labels)

    def embed(self, batch: Batch) -> EncodedBatch:
        # One pass of views of one shape: batch norm sees all views together, as in the reference.
        return embedded({"view": in_passes(self.branch, batch.views)}, batch, self._pair)

    def _pair(self, rows: dict[str, Any], seed: int) -> AnyPairs:
        views = rows["view"]
        labels, index = rows.get("labels"), rows.get("index")
        if self.repel != "in-turn":
            pairs = [Pairs.from_views(views, labels, index, self.repel)]
        else:
            turns = ([views[n], *views[:n], *views[n + 1 :]] for n in range(len(views)))
            pairs = [Pairs.from_views(each, labels, index, "queries") for each in turns]
        if self.negatives is not None:
            pairs = [keep_negatives(each, self.negatives, seed + n) for n, each in enumerate(pairs)]
        return pairs[0] if len(pairs) == 1 else tuple(pairs)


class SupCon(SimCLR):
    """All views of all images of an anchor's class are its positives (supervised contrast, Khosla et al. 2020).

        >>> backbone = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 16))
        >>> model = SupCon(backbone)
        >>> labels = torch.tensor([0, 0, 1, 1])
        >>> loss = model([torch.rand(4, 3, 8, 8), torch.rand(4, 3, 8, 8)], labels)

    This is the framework of recipes with `vision.pairs = "labels"`. One view is enough if a batch has several images of
    a class. A negative label means unknown.

    Args:
        backbone: any module that maps images (n, C, H, W) to features (n, ...), which are flattened.
        objective: its text, an Objective or a Composite.
        head: the projection head. None is the paper's (`projection_head`), `nn.Identity()` is none.
        negatives: random negatives for each anchor, from the batch of all ranks. None uses all.
    """

    head_name = "supcon"
    fewest_views = 1

    def __init__(
        self,
        backbone: nn.Module,
        objective: AnyObjective | None = "supcon(temperature=0.1)",
        head: nn.Module | None = None,
        negatives: int | None = None,
    ) -> None:
        super().__init__(backbone, objective, head, negatives)

    def forward(self, views: Sequence[Tensor], labels: Tensor | None = None, index: Tensor | None = None) -> Tensor:
        if labels is None:
            raise PairsError("SupCon finds positives by the labels: model(views, labels), with (B,) class numbers.")
        return super().forward(views, labels, index)

    def _pair(self, rows: dict[str, Any], seed: int) -> AnyPairs:
        return Pairs.from_labels(rows["view"], rows["labels"], rows.get("index"))


def keep_negatives(pairs: Pairs, count: int, seed: int) -> Pairs:
    """Select `count` random negatives of every anchor. LMCL and CLLR vary this number (Fig. 4)."""
    anchors, candidates, first = len(pairs.anchors), len(pairs.candidates), pairs.first_negative
    device = pairs.anchors.device
    rank = torch.rand(anchors, candidates, generator=generator(seed, device), device=device)
    rank.scatter_(1, pairs.excluded, 2.0)  # after all negatives
    rank[:, :first] = 2.0
    excluded = pairs.excluded.shape[1]
    if first:
        # The candidates before `first` are not negatives, and include all positives.
        excluded = first + pairs.ignored.shape[1]
    if count > candidates - excluded:
        raise PairsError(f"SimCLR: an anchor has {candidates - excluded} negatives, fewer than negatives = {count}.")
    return pairs.without(rank.argsort(1)[:, count : candidates - excluded], distinct=True)
