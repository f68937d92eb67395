"""Prioritised replay (Schaul et al. 2016): transitions are drawn in proportion to their last error."""

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dipole.core.utils.errors import TrainingError
from dipole.rl.arguments import check_number
from dipole.rl.replay import FrameReplayBuffer

_LEAST = 1e-6  # added to every error, so that nothing is forgotten for ever


class SumTree:
    """Weights of n places; a place of a partial sum is found, and a weight is changed, in log n steps.

    Args:
        places: n.
    """

    def __init__(self, places: int) -> None:
        self.leaves = 1 << max(places - 1, 1).bit_length()
        self.sums = np.zeros(2 * self.leaves, np.float64)  # node i has the children 2 i and 2 i + 1

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self.sums[1])

    def __getitem__(self, places: Any) -> NDArray[np.float64]:
        found: NDArray[np.float64] = self.sums[self.leaves + np.asarray(places)]
        return found

    def __setitem__(self, places: Any, weights: Any) -> None:
        nodes = self.leaves + np.atleast_1d(np.asarray(places))
        self.sums[nodes] = weights
        while nodes[0] > 1:
            nodes = np.unique(nodes // 2)
            self.sums[nodes] = self.sums[2 * nodes] + self.sums[2 * nodes + 1]

    def find(self, sums: NDArray[np.float64]) -> NDArray[np.int64]:
        """The places (B,) at which the running sum of weights first exceeds `sums` (B,), of 0 to the total."""
        nodes, sums = np.ones(len(sums), np.int64), sums.copy()
        while nodes[0] < self.leaves:
            left = self.sums[2 * nodes]
            # Rounding must not lead into a branch without weight.
            right = (sums >= left) & (self.sums[2 * nodes + 1] > 0)
            sums -= np.where(right, left, 0.0)
            nodes = 2 * nodes + right
        return nodes - self.leaves


class PrioritizedFrameReplayBuffer(FrameReplayBuffer):
    """`FrameReplayBuffer` that draws transition i with P(i) = p_i^alpha / sum_k p_k^alpha (Schaul et al. 2016, eq. 1).

    p is the last error plus 1e-6; a new transition has the largest p there was. Each draw comes with its importance
    weight (N P(i))^-beta, divided by the largest of the batch (sec. 3.4).

    Args:
        given: as in `FrameReplayBuffer`.
        exponent: alpha, in [0, 1].
        beta: exponent of the importance weights, in [0, 1]; the agent raises it.
        settings: as in `FrameReplayBuffer`, by name.

    Raises:
        ConfigError: `exponent` or `beta` is out of its range, and as `FrameReplayBuffer`.
        TrainingError: as `FrameReplayBuffer`.
    """

    follows_errors: ClassVar[bool] = True

    def __init__(self, *given: Any, exponent: float = 0.5, beta: float = 0.4, **settings: Any) -> None:
        check_number(0, 1, exponent=exponent, beta=beta)
        self.exponent, self.beta = exponent, beta
        super().__init__(*given, **settings)

    def reset(self) -> None:
        super().reset()
        self.tree = SumTree(self.n_envs * self.buffer_size)
        self.largest = 1.0  # p_i^alpha

    def _append(self, env: int, *step: Any) -> None:
        super()._append(env, *step)
        slot = int(self._head[env] - 1) % self.buffer_size
        self.tree[env * self.buffer_size + slot] = self.largest if self.valid[env, slot] else 0.0

    def draw(self, batch_size: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Draw transitions by their priorities, one from each of as many equal shares of their sum.

        Args:
            batch_size: B >= 1.

        Returns:
            Environment (B,) and slot (B,) of each.

        Raises:
            TrainingError: nothing is stored.
        """
        for _ in range(100):
            if len(self) == 0 or self.tree.total <= 0:
                break
            shares = (np.arange(batch_size) + self.rng.random(batch_size)) / batch_size
            env, slot = np.divmod(self.tree.find(shares * self.tree.total), self.buffer_size)
            there = self._is_there(env, slot)
            if there.all():
                return env, slot
            # The ring has overwritten a frame of these.
            self.tree[(env * self.buffer_size + slot)[~there]] = 0.0
        raise TrainingError("the replay buffer is empty: nothing can be sampled from it yet.")

    def _is_there(self, env: NDArray[Any], slot: NDArray[Any]) -> NDArray[np.bool_]:
        age = (self._head[env] - 1 - slot) % self.buffer_size
        found: NDArray[np.bool_] = self.valid[env, slot] & (age < self._head[env] - self._tail[env])
        return found

    def weights(self, env: NDArray[Any], slot: NDArray[Any]) -> Tensor:
        """Importance weights of drawn transitions, (B, 1), the largest of them 1.

        Args:
            env: (B,) of `draw`.
            slot: (B,) of `draw`.
        """
        share = self.tree[env * self.buffer_size + slot] / self.tree.total
        found = (len(self) * share) ** -self.beta
        return self._tensor((found / found.max())[:, None].astype(np.float32))

    def set_errors(self, drawn: NDArray[Any], errors: NDArray[Any]) -> None:
        """Set the priorities of drawn transitions.

        Args:
            drawn: (B, 2), environment and slot, of `FrameBatch.drawn`.
            errors: (B,), not negative.
        """
        priorities = (np.asarray(errors, np.float64) + _LEAST) ** self.exponent
        self.largest = max(self.largest, float(priorities.max()))
        self.tree[drawn[:, 0] * self.buffer_size + drawn[:, 1]] = priorities

    def places(self) -> dict[str, Any]:
        places = np.arange(self.n_envs * self.buffer_size)
        used = int(min(self._head.max(), self.buffer_size))
        kept = self.tree[places].reshape(self.n_envs, -1)[:, :used]
        return super().places() | {"priorities": kept.copy(), "largest": self.largest}

    def load_places(self, state: dict[str, Any]) -> None:
        super().load_places(state)
        kept = np.asarray(state["priorities"], np.float64)
        if kept.shape[0] != self.n_envs or kept.shape[1] > self.buffer_size or not (kept >= 0).all():
            raise ValueError(f"priorities of the shape {kept.shape} do not fit this replay")
        places = np.arange(self.n_envs)[:, None] * self.buffer_size + np.arange(kept.shape[1])
        if kept.size:
            self.tree[places.ravel()] = kept.ravel()
        self.largest = float(state["largest"])
