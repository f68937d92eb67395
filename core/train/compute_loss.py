"""An objective as the loss of transformers' Trainer: a `compute_loss_func` of what a model returns and of labels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dipole.core.objectives.checks import check_matrix, shape_of
from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.objectives.objective import Composite, Objective
from dipole.core.objectives.objective import objective as build_objective
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.spec import check_whole
from dipole.core.utils.distributed import all_numbers, world_size
from dipole.core.utils.errors import ConfigError, OptionError, PairsError

IGNORED = -100
"""The label that the trainer does not count as an item."""
NAMES = (("text_embeds", "image_embeds"), ("query_embeds", "document_embeds"), ("embeddings",), ("pooler_output",))

Relate = Callable[[Any, Tensor | None], "Pairs | EncodedBatch | tuple[Pairs, ...]"]


@dataclass(eq=False)
class ComputeLoss:
    """A `compute_loss_func`. Build it with `compute_loss`.

    Args:
        objective: the built objective.
        embeddings: names of the model's outputs. None: the known names.
        pairs: a function instead of names, or None.
        model: holds the objective. None if the objective has no parameters.
        accumulation: batches of an optimizer step, >= 1.
        called: whether it was called since the last optimizer step, for `ObjectiveCallback`.
    """

    objective: Composite
    embeddings: Sequence[str] | None
    pairs: Relate | None
    model: nn.Module | None
    accumulation: int
    called: bool = False

    def trains(self, model: nn.Module) -> bool:
        """Return whether the objective is a part of a model.

        Args:
            model: as the trainer has it, in DistributedDataParallel or not.
        """
        if isinstance(model, DistributedDataParallel):
            model = model.module
        return self.model is not None and model is self.model

    def __call__(
        self, outputs: Any, labels: Tensor | None = None, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Return the loss of a batch, divided as the trainer expects.

        Args:
            outputs: what the model returned.
            labels: (B,) class numbers, or whatever the data set has as labels: without classes they are counted alone.
            num_items_in_batch: labels other than -100 in all batches of an optimizer step.
        """
        self.called = self.model is None and torch.is_grad_enabled()
        pairs = (self.pairs or self._by_name)(outputs, labels)
        loss: Tensor = self.objective(pairs).loss
        if num_items_in_batch is None or labels is None:
            return loss / self.accumulation
        items = labels.ne(IGNORED).sum().item()
        if world_size() > 1:
            # Every rank has the loss of all rows. The trainer multiplies by the number of processes where it has
            # counted the items of all of them.
            items = fmean(each for (each,) in all_numbers([int(items)]))
        return loss * items / num_items_in_batch

    def _by_name(self, outputs: Any, labels: Tensor | None) -> Pairs | tuple[Pairs, ...]:
        found: Mapping[str, Tensor] = {type(outputs).__name__: outputs}
        names = self.embeddings and tuple(self.embeddings)
        if isinstance(outputs, Mapping):
            found = outputs
            names = names or next((each for each in NAMES if set(each) <= set(found)), None)
        elif isinstance(outputs, Tensor):
            names = names or tuple(found)
        if names is None or not set(names) <= set(found):
            wanted = " and ".join(names or ["known embeddings"])
            raise PairsError(
                f"the model returned {', '.join(map(str, found))}, and no {wanted}: give embeddings=, the names of the "
                "outputs that hold them, or pairs=, a function from outputs and labels to Pairs."
            )
        views = [check_matrix(name, found[name]) for name in names]
        classes = None
        if shape_of(labels) == str((len(views[0]),)):
            classes = labels
        if len(views) == 2:
            return Pairs.both(views[0], views[1], classes)
        if len(views) > 2:
            return Pairs.from_views(views, classes)
        if classes is None:
            raise PairsError(
                "one matrix of embeddings has no positives without labels: give the data set a column 'labels' of "
                "class numbers, let the model return two, or give pairs=, a function from outputs and labels to Pairs."
            )
        return Pairs.from_labels(views[0], classes)


def as_composite(given: str | Objective | Composite) -> Composite:
    """Return a Composite of a text, an Objective or a Composite. Raise ConfigError for anything else."""
    if isinstance(given, str):
        return build_objective(given)
    if isinstance(given, Objective):
        return Composite([given], [1.0])
    if not isinstance(given, Composite):
        raise ConfigError(
            "objective must be a text such as 'infonce + 0.1*dp', an Objective or a Composite, got "
            f"{type(given).__name__}. A function of embeddings becomes a class as in docs/how-to/own-losses.md."
        )
    return given


def compute_loss(
    objective: str | Objective | Composite,
    *,
    embeddings: Sequence[str] | None = None,
    pairs: Relate | None = None,
    model: nn.Module | None = None,
    dim: int | None = None,
    gradient_accumulation_steps: int = 1,
) -> ComputeLoss:
    """Return a `compute_loss_func` for transformers' Trainer: (outputs, labels, num_items_in_batch) -> loss, ().

        trainer = Trainer(model, args, train_dataset=..., compute_loss_func=dipole.compute_loss("infonce + 0.1*dp"))

    The loss is computed over the rows of all ranks. The trainer adds up the batches of an optimizer step. It expects
    each to be divided by `num_items_in_batch`, the number of their labels. Each batch is weighted by its share of the
    labels other than -100, so equal batches are averaged. Without labels, pass `gradient_accumulation_steps`.

    Args:
        objective: its text, an Objective or a Composite.
        embeddings: names of the model's outputs (B, d). Two outputs are contrasted in both directions. One output needs
            labels. More than two are views of an instance. By default text_embeds and image_embeds (CLIP), query_embeds
            and document_embeds, embeddings, pooler_output, or the tensor that the model returns.
        pairs: instead of names, a function from outputs and labels to Pairs.
        model: needed if the objective has parameters. The objective becomes its submodule
            `objective`, so the trainer optimises and saves both.
        dim: width of the embeddings, >= 1, needed with `model` for terms that have parameters of that width.
        gradient_accumulation_steps: the trainer's argument of that name, >= 1. Only used without labels.

    Raises:
        SpecError: for a wrong text.
        OptionError: arguments out of their range, or that exclude each other.
        ConfigError: `objective` is of another kind, or has parameters and there is no model or width, or the model has
            a part `objective` already.
        PairsError: the objective has parameters of another width than `dim`. From a call: outputs without embeddings,
            or that cannot be paired.

    Example:
        >>> outputs = {"text_embeds": torch.randn(8, 4), "image_embeds": torch.randn(8, 4)}
        >>> loss = dipole.compute_loss("infonce", gradient_accumulation_steps=2)(outputs)
        >>> loss.shape
        torch.Size([])
    """
    if pairs is not None and embeddings is not None:
        raise OptionError("compute_loss takes embeddings= or pairs=, not both.")
    if isinstance(embeddings, str):
        embeddings = (embeddings,)
    named = embeddings is None or isinstance(embeddings, Sequence)
    if not named or not all(isinstance(each, str) for each in embeddings or ()):
        raise OptionError(f"embeddings must be names of the model's outputs, got {embeddings!r}.", "embeddings")
    if model is not None and not isinstance(model, nn.Module):
        raise OptionError(f"model must be the module that is trained, got {model!r}.", "model")
    if pairs is not None and not callable(pairs):
        raise OptionError(f"pairs must be a function from outputs and labels to Pairs, got {pairs!r}.", "pairs")
    check_whole("gradient_accumulation_steps", gradient_accumulation_steps)
    built = as_composite(objective)
    if dim is not None:
        built.build(dim)
    if any(map(nn.parameter.is_lazy, built.parameters())):
        raise ConfigError(
            f"{built} has parameters as wide as the embeddings: give that width, compute_loss(..., dim=, model=)."
        )
    if any(True for _ in built.parameters()) and model is None:
        raise ConfigError(
            f"{built} has parameters, which the trainer must optimise and save: give compute_loss(..., model=model), "
            "before the trainer is built."
        )
    if model is not None:
        if hasattr(model, "objective") and model.objective is not built:
            raise ConfigError(
                f"{type(model).__name__} has a part `objective` already. Give compute_loss another model."
            )
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        model.add_module("objective", built.to(device))
    found = ComputeLoss(built, embeddings, pairs, model, gradient_accumulation_steps)
    if model is not None or find_spec("transformers") is not None:
        from dipole.core.train.objective_callback import carry

        carry(found, in_model=model is not None)
    return found
