"""An objective as a loss of sentence-transformers, for batches larger than memory holds activations of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from dipole.core.objectives.objective import Composite, Objective
from dipole.core.objectives.spec import check_whole
from dipole.core.utils.errors import ConfigError, PairsError
from dipole.core.utils.microbatch import microbatched, own_forward, patched_forward
from dipole.text.contrastive_loss import ContrastiveLoss, Direction, unwrapped

SHARED = ("prompt_length",)
"""Tensors among the features that belong to the batch, not to its rows."""


class CachedContrastiveLoss(ContrastiveLoss):
    """`ContrastiveLoss` whose memory grows with `mini_batch_size`, while the loss sees the whole batch.

        >>> loss = CachedContrastiveLoss(model, "infonce(temperature=0.05)", mini_batch_size=32)
        >>> columns = [model.preprocess(texts) for texts in (["a cat", "a dog"], ["the cat sleeps", "the dog barks"])]
        >>> loss(columns, labels=None).backward()

    Sentences are embedded without a graph, and again, some at a time, when their gradient is known (Gao et al. 2021,
    Sec. 3.2). Without dropout the value and every gradient equal those of ContrastiveLoss. With dropout each mini-batch
    draws its own masks, as in CachedMultipleNegativesRankingLoss.

    Args:
        model: as in `ContrastiveLoss`, and so for the others.
        objective: text, Objective or Composite.
        mini_batch_size: sentences that the model sees at a time, >= 1.
        gather_across_devices: embeddings of all ranks are candidates.
        directions: which column asks which.
        partition_mode: "joint" or "per_direction".

    Raises:
        OptionError: mini_batch_size, directions or partition_mode are none of these.
        SpecError: for a wrong text.
        ConfigError: as `ContrastiveLoss`; from a call inside AdaptiveLayerLoss, which needs the complete batch.
        PairsError: as `ContrastiveLoss`; from a call, features that cannot be given some rows at a time
            (StaticEmbedding, flattened inputs, images of several sizes).
    """

    def __init__(
        self,
        model: SentenceTransformer,
        objective: str | Objective | Composite,
        *,
        mini_batch_size: int = 32,
        gather_across_devices: bool = False,
        directions: Sequence[Direction] = ("query_to_doc",),
        partition_mode: Literal["joint", "per_direction"] = "joint",
    ) -> None:
        check_whole("mini_batch_size", mini_batch_size)
        super().__init__(
            model,
            objective,
            gather_across_devices=gather_across_devices,
            directions=directions,
            partition_mode=partition_mode,
        )
        self.mini_batch_size = mini_batch_size

    def embed(self, columns: list[dict[str, Tensor]]) -> list[Tensor]:
        with self._divided(unwrapped(self.model)):
            return super().embed(columns)

    @contextmanager
    def _divided(self, model: Any) -> Iterator[None]:
        """Let the model compute some rows at a time, below the decorator of MatryoshkaLoss."""
        if any(hasattr(part.__dict__.get("forward"), "set_layer_idx") for part in model.children()):
            raise ConfigError(
                "CachedContrastiveLoss does not work inside AdaptiveLayerLoss or Matryoshka2dLoss: they read every "
                "layer of the complete batch. Use ContrastiveLoss there, or MatryoshkaLoss here."
            )
        decorator: Any = model.__dict__.get("forward")
        inner = getattr(decorator, "fn", None)
        if not callable(inner):
            with patched_forward(model, self._rows_at_a_time(model, own_forward(model))):
                yield
            return
        decorator.fn = self._rows_at_a_time(model, inner)
        try:
            yield
        finally:
            decorator.fn = inner

    def _rows_at_a_time(self, model: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def divided(features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            rows, shared = _split(model, features)

            def run(part: dict[str, Any]) -> dict[str, Tensor]:
                # A module may change what it is given, and the second pass is given the same.
                own = {name: value.clone() for name, value in part.items()}
                return {"sentence_embedding": forward({**shared, **own}, **kwargs)["sentence_embedding"]}

            found: dict[str, Any] = microbatched(model, self.mini_batch_size, run)(rows)
            return found

        return divided

    def get_config_dict(self) -> dict[str, Any]:
        return {**super().get_config_dict(), "mini_batch_size": self.mini_batch_size}

    @property
    def citation(self) -> str:
        return super().citation + (
            "\n@misc{gao2021scaling,\n"
            "    title={Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup},\n"
            "    author={Luyu Gao and Yunyi Zhang and Jiawei Han and Jamie Callan},\n"
            "    year={2021},\n    eprint={2101.06983},\n    archivePrefix={arXiv},\n    primaryClass={cs.LG}\n}\n"
        )


def _split(model: nn.Module, features: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Divide features into tensors with a row for each sentence, and the others."""
    tensors = {n: v for n, v in features.items() if isinstance(v, Tensor) and v.ndim and n not in SHARED}
    counts = {name: len(value) for name, value in tensors.items()}
    if not tensors or len(set(counts.values())) > 1 or "offsets" in features or "cu_seq_lens_q" in features:
        shown = ", ".join(f"{name} {tuple(value.shape)}" for name, value in tensors.items())
        raise PairsError(
            f"CachedContrastiveLoss cannot give {type(model).__name__} some sentences at a time: its features must "
            f"have a row for each, got {shown or 'none'}. Use ContrastiveLoss for StaticEmbedding and flattened inputs."
        )
    return tensors, {name: value for name, value in features.items() if name not in tensors}
