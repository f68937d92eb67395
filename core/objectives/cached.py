"""Train your own encoder on large batches with little memory, by encoding in microbatches."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from dipole.core.objectives.checks import check_tensor
from dipole.core.objectives.objective import Composite
from dipole.core.objectives.objective import objective as build_objective
from dipole.core.objectives.spec import check_whole
from dipole.core.objectives.term_values import Outcome
from dipole.core.utils.errors import OptionError, PairsError
from dipole.core.utils.microbatch import microbatched, patched_forward


class cached(nn.Module):  # noqa: N801, it is used as a function
    """Join an encoder and an objective so that memory grows with `microbatch` and the loss sees the whole batch.

        >>> step = dipole.cached(torch.nn.Linear(8, 4), "infonce(temperature=0.1)", microbatch=32)
        >>> loss = step(torch.randn(256, 8), torch.randn(256, 8))  # each (B, ...), B as large as the loss should see
        >>> loss.backward()

    Without dropout the gradient equals that of `objective(encoder(view1), encoder(view2))`. With dropout each
    microbatch draws its own masks, the same in both passes. The first pass computes embeddings without a graph. The
    loss gives their gradient, and the encoder runs again on each microbatch (Gao et al. 2021, Sec. 3.2). Buffers are
    updated once. Batch norm takes its statistics from a microbatch. Second derivatives raise an error.

    Args:
        encoder: takes a view, a tensor (B, ...) or a mapping, list or tuple of such, and returns embeddings (B, d).
            It may be wrapped in DistributedDataParallel, or `cached(...)` itself may be.
        objective: from `dipole.objective`, its text, or any function of embeddings that returns a scalar.
        microbatch: rows that the encoder sees at a time, >= 1.
        pairs: converts embeddings to `Pairs` or `EncodedBatch`. By default the embeddings are views.

    Raises:
        OptionError: an argument has a wrong type or value.
        SpecError: the text is invalid.
        PairsError: from a call, if rows do not fit together.

    It is a module with the parameters of both. A call returns the loss, (). `embed(view)` returns embeddings, (B, d).

    Source: Gao et al. 2021 (GradCache). They call backward twice. Here the second pass is part of the caller's backward
    pass, so hooks, loss scaling and gradient synchronisation see each parameter's gradient once.
    """

    def __init__(
        self,
        encoder: nn.Module,
        objective: nn.Module | Callable[..., Any] | str,
        *,
        microbatch: int,
        pairs: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(encoder, nn.Module):
            raise OptionError(
                f"cached: encoder must be a torch.nn.Module, got {type(encoder).__name__}. Several encoders are one "
                "module whose forward pass calls each of them."
            )
        if isinstance(objective, str):
            objective = build_objective(objective)
        elif not callable(objective):
            raise OptionError(
                f"cached: objective must be an objective, its text or a function of embeddings, got {objective!r}."
            )
        if pairs is not None and not callable(pairs):
            raise OptionError(f"cached: pairs must be a function from embeddings to Pairs, got {pairs!r}.")
        check_whole("cached: microbatch", microbatch)
        self.encoder = encoder
        self.objective = objective
        self.microbatch = microbatch
        self._pairs = pairs

    def embed(self, view: Any) -> Any:
        """Encode all rows of one view, `microbatch` rows at a time.

        Args:
            view: (B, ...), or a mapping, list or tuple of such tensors.

        Returns:
            The output of the encoder, such as (B, d).

        Raises:
            PairsError: an input or output does not have one row per instance.
        """
        for each in tree_leaves(view):
            if isinstance(each, Tensor):
                check_tensor("an input of the encoder", each, "(B, ...)")
        # DistributedDataParallel must see one forward pass and one gradient per parameter.
        inner = self.encoder.module if isinstance(self.encoder, DistributedDataParallel) else self.encoder
        with patched_forward(inner, microbatched(inner, self.microbatch)):
            return self.encoder(view)

    def forward(self, *views: Any, **given: Any) -> Tensor:
        """Return the loss of a batch, (). `loss.backward()` runs the encoder again, microbatch by microbatch.

        Args:
            views: inputs of the encoder, which is called once for each. You may pass a single list or tuple of views.
            given: passed on to `pairs` (labels, indices).

        Raises:
            PairsError: the objective cannot be evaluated on the rows. Without `pairs`, also if there are fewer than two
                views, if `given` is not empty, or if the encoder does not return embeddings.
        """
        if len(views) == 1 and isinstance(views[0], list | tuple):
            views = tuple(views[0])
        embeddings = [self.embed(view) for view in views]
        if self._pairs is not None:
            embeddings = [self._pairs(*embeddings, **given)]
        elif given:
            raise PairsError(f"{', '.join(given)}: only a function `pairs` takes more than views. Give one to cached.")
        elif isinstance(self.objective, Composite) and not all(isinstance(each, Tensor) for each in embeddings):
            raise PairsError(
                f"{type(self.encoder).__name__} returned a {type(embeddings[0]).__name__}, not embeddings (rows, d): "
                "give `pairs`, a function from what it returns to Pairs such as lambda z: Pairs.cross(*z)."
            )
        elif len(embeddings) < 2:
            raise PairsError(
                f"cached was called with {'one view, which alone' if embeddings else 'no view, which'} has no "
                "positives: give two or more, or `pairs`, a function from embeddings to Pairs such as "
                "lambda z: Pairs.from_blocks(z.view(-1, 2, d))."
            )
        found: Outcome | Tensor = self.objective(*embeddings)
        if isinstance(found, Outcome):
            return found.loss
        return found
