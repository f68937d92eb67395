"""Pass the encoder's features beside the embeddings, for objectives that act on them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.utils.errors import ConfigError
from dipole.vision.frameworks.branch import Branch


class PassedFeatures:
    """Records what the encoders give their projectors, in the order of the calls.

    Args:
        branches: each then returns (embeddings, features), of which a hook removes the features again. So they are rows
            of the branch's output also where it runs in microbatches.

    Raises:
        ConfigError: the encoders have different or unknown widths.
    """

    def __init__(self, branches: Sequence[Branch]) -> None:
        widths = {branch.width for branch in branches}
        if len(widths) > 1:
            raise ConfigError(
                "objective: a term acts on the encoder's features, and the encoders of this method have features of "
                "different widths. Take vision.method = 'simclr', or vision.encoder.projector = 'none'."
            )
        (self.width,) = widths
        self._found: list[Tensor] = []
        self._recording = False
        for branch in branches:
            branch.returns_features = True
            branch.register_forward_hook(self._take)

    def _take(self, branch: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> Tensor:
        embeddings, features = output
        if self._recording:
            self._found.append(features)
        return embeddings

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the features of a batch in a `with` block."""
        self._found, self._recording = [], True
        try:
            yield
        finally:
            self._recording = False

    def added(self, embedded: EncodedBatch, images: int) -> EncodedBatch:
        """Return the rows of a batch with the recorded features of each view.

        Args:
            embedded: the rows.
            images: of the batch. A row has as many features as images, such as a block's.
        """
        views = [view for each in self._found for view in each.split(images)]
        self._found = []
        rows = len(next(row for row in embedded.rows.values() if row is not None))
        if rows < images:
            views = [view.view(rows, images // rows, view.shape[1]) for view in views]
        named = {f"features of view {number}": view for number, view in enumerate(views)}
        return replace(embedded, rows={**embedded.rows, **named}, features=tuple(named))
