"""The computable parts of CLLR's theorems: contrast of distances, and convergence of the gradient."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dipole.core.evaluation.arrays import Array, as_matrix, diagnostic


@diagnostic(formula="var[ D/E(D) ], D(x, x_i) = ||Phi(x) - Phi(x_i)||^2 / H", source="CLLR Thm. 1")
def relative_variance(features: Array) -> float:
    """Return the relative variance of squared distances, which goes to 0 as distances lose their contrast.

    Formula (CLLR Thm. 1): var[ D/E(D) ], D(x, x_i) = ||Phi(x) - Phi(x_i)||^2 / H, whose divisor H cancels.

    Args:
        features: (n >= 2, H), not normalised.

    Returns:
        The variance, or nan if all points coincide.
    """
    squared = torch.pdist(as_matrix("features", features, rows=2).double()).square()
    mean = squared.mean()
    return float((squared / mean).var(unbiased=False))


def implied_constant(ratio: float, alpha: float, weight: float) -> float:
    """Return the largest C(X) for which CLLR's Theorem 3 holds: ratio/(alpha lambda), inf for 0."""
    return ratio / (alpha * weight) if alpha * weight > 0 else math.inf


LOGGED = (
    ("train/loss", "train/grad_norm_squared"),
    ("train/contrast_loss", "train/contrast_grad_norm_squared"),  # of an agent, whose other losses are not F
)
"""Names of F and of the squared norm of its gradient in metrics.jsonl."""


@dataclass(frozen=True)
class Stationarity:
    """Gradient norms over the training (CLLR, Theorem 2)."""

    steps: list[int]  # T of each logged line in updates, (n,)
    least: list[float]  # running minimum of ||grad F||^2, (n,)
    bound: list[float]  # delta sqrt( 2 S (F_0 - F*)/T ), (n,)
    gradient: float  # delta, the largest logged gradient norm
    descent: float  # F_0 - F*, from the first logged loss to the smallest
    implied_smoothness: float  # the smallest S for which the bound holds at every line


def stationarity(lines: Sequence[Mapping[str, Any]], smoothness: float = 1.0) -> Stationarity | None:
    """Return min_{t<T} ||grad F||^2 and delta sqrt( 2 S (F_0 - F*)/T ) (CLLR, Theorem 2, Eq. 11).

    metrics.jsonl has means over the steps since the previous line. The norm is of a mini-batch's gradient, whose square
    exceeds that of F in expectation. The paper gives no value of S, the smoothness of F. None: no gradient was logged.
    """
    loss, norm = next((names for names in LOGGED if any(line.get(names[1]) is not None for line in lines)), ("", ""))
    seen = [line for line in lines if line.get(loss) is not None and line.get(norm) is not None]
    if not seen:
        return None
    values, losses = [line[norm] for line in seen], [line[loss] for line in seen]
    # An agent counts environment steps, and logs its updates separately.
    steps = [int(line.get("train/n_updates") or line["step"]) for line in seen]
    least = torch.tensor(values, dtype=torch.double).cummin(0).values.tolist()
    gradient, descent = math.sqrt(max(values)), losses[0] - min(losses)
    bound = [gradient * math.sqrt(2 * smoothness * descent / step) for step in steps]
    scale = 2 * gradient**2 * descent
    implied = math.inf
    if scale:
        implied = max(value**2 * step / scale for value, step in zip(least, steps, strict=True))
    return Stationarity(steps, least, bound, gradient, descent, implied)
