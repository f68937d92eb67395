"""LMCL: what its theorems say of distances D_ij = (1 - cos_ij)/2, as far as it can be computed."""

import math

import torch
from torch import Tensor

from dipole.core.evaluation.arrays import Array, as_matrix, diagnostic
from dipole.core.evaluation.histograms import pair_distances
from dipole.core.evaluation.logistic import fit_softmax
from dipole.core.objectives.regularizers.dp import polarization


def coverage(embeddings: Tensor, grid: int = 101) -> tuple[Tensor, Tensor]:
    """Return mu (grid,) and min_{i<j} |D_ij - mu| (grid,), which goes to 0 as N grows (LMCL, Theorem 1)."""
    distances = torch.cat([distance for distance, _, _ in pair_distances(embeddings)]).double().sort().values
    mu = torch.linspace(0, 1, grid, dtype=torch.double)
    place = torch.searchsorted(distances, mu)
    after = (distances[place.clamp_max(len(distances) - 1)] - mu).abs()
    before = (distances[(place - 1).clamp_min(0)] - mu).abs()
    return mu, torch.minimum(after, before)


@diagnostic(
    formula="max over mu in [0, 1] of min_{i<j} |D_ij - mu|",
    source="LMCL Thm. 1",
    cost="one pass over the similarity matrix, and its entries sorted",
)
def distance_coverage(embeddings: Array) -> float:
    """The widest gap of the distances: the eps of the theorem that says distances fill [0, 1].

    Args:
        embeddings: (n >= 2, d).
    """
    return float(coverage(as_matrix("embeddings", embeddings, rows=2))[1].max())


def separation(embeddings: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the largest D within a class and the smallest between classes (LMCL, Theorem 2, Eq. 7), or nan.

    An embedding exists for which the first is at most 1/2 - tau and the second at least 1/2, if C < d: f(x) = e_y.
    """
    widest, nearest = math.nan, math.nan
    for distance, i, j in pair_distances(embeddings):
        same = (labels[i.to(labels.device)] == labels[j.to(labels.device)]).to(distance.device)
        if bool(same.any()):
            widest = max(float(distance[same].max()), widest)  # the first number stays beside nan
        if bool((~same).any()):
            nearest = min(float(distance[~same].min()), nearest)
    return widest, nearest


def regularizer(embeddings: Tensor, delta_pos: float, delta_neg: float, reduction: str = "mean") -> float:
    """R1 over all pairs: g(D) = |min( (D - delta_pos)(D - delta_neg), 0 )|, reduced as `dp` does (LMCL, Eqs. 6-10).

    It is the mean of g (reduction mean), times n - 1 (anchor_sum), or times n (n - 1) (sum, as printed).
    """
    n = len(embeddings)
    factor = {"mean": 1, "anchor_sum": n - 1, "sum": n * (n - 1)}[reduction]
    total, count = 0.0, 0
    for distance, _, _ in pair_distances(embeddings):
        total += float(polarization(1 - 2 * distance.double(), delta_pos, delta_neg).sum())
        count += distance.numel()
    return factor * total / count


def proof_delta_pos(embeddings: Tensor, labels: Tensor) -> float:
    """The delta+ of the proof of LMCL's Theorem 3: as many pairs lie below it as share a class."""
    distances = torch.cat([distance for distance, _, _ in pair_distances(embeddings)])
    same = sum(count * (count - 1) // 2 for count in labels.unique(return_counts=True)[1].tolist())
    return float(distances.sort().values[same - 1]) if same else 0.0


def generalization(
    negatives: float, points: float, rademacher: float, confidence: float = 0.95, constant: float = 1.0
) -> float:
    """constant ( Q1 Rad_H(lambda)/N + sqrt(Q2/N) ), Q1 = sqrt(1 + 1/n), Q2 = log(1/delta) log^2(n) (Theorem 4).

    `constant` is what the paper's O hides, and no formula gives `rademacher` for a network. Both are free.
    """
    q1 = math.sqrt(1 + 1 / negatives)
    q2 = -math.log1p(-confidence) * math.log(negatives) ** 2
    return constant * (q1 * rademacher / points + math.sqrt(q2 / points))


def softmax_loss(embeddings: Tensor, labels: Tensor) -> float:
    """L_SM = inf_W of the cross-entropy of a softmax classifier with a bias, in nats, by an l2 of 1e-6 (Sec. 4.2)."""
    y = labels.unique(return_inverse=True)[1]
    weight, bias, _ = fit_softmax(embeddings, y, int(y.max()) + 1, l2=1e-6)
    return float(torch.nn.functional.cross_entropy(embeddings.double() @ weight.T + bias, y))
