"""Contrastive attraction and contrastive repulsion: far positives attract more, near negatives repel more."""

from typing import Annotated, Literal

import torch
from torch import Tensor

from dipole.core.objectives.objective import Objective, Rows
from dipole.core.objectives.pair_data import other_views, views_of
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.registry import register
from dipole.core.objectives.similarity import listed_similarities
from dipole.core.objectives.spec import Range
from dipole.core.objectives.statistics import AnyStatistic, LogSumExp, SoftmaxMean, Sum
from dipole.core.utils.errors import PairsError

Weights = Literal["contrastive", "uniform", "reversed"]
_SIGN: dict[str, float] = {"contrastive": 1.0, "uniform": 0.0, "reversed": -1.0}


def attraction(squared: Tensor, cost: Tensor, sharpness: float, detach: bool, mask: Tensor | None) -> Tensor:
    """Return sum_p softmax_p( sharpness * d2_ip ) c_ip, (A,), from squared distances and costs (A, K) of positives.

    With `detach` the weights have no gradient. `mask` (A, K) is True at the real positives. None means all.
    """
    logits = sharpness * squared
    if mask is not None:
        logits = torch.where(mask, logits, -torch.inf)
    weights = torch.softmax(logits.detach() if detach else logits, 1)
    if mask is not None:
        # An anchor whose positives are all padding has no weights. The mean skips its row.
        weights = torch.where(mask, weights, 0.0)
    return (weights * cost).sum(1)


@register(
    "cacr",
    formula="mean_i sum_p pi+_ip c_ip - mean_i sum_j pi-_ij c_ij, pi+ ~ e^{+t_pos d2_ip}, pi- ~ e^{-t_neg d2_ij}",
    source="CACR Eqs. 2-5, 11-14, App. B.5, C.2, Algorithm 3, Table 8",
    deviations={
        "CACR": (
            "t_pos of Eq. 2 and t_neg of Eq. 4 are 1.0 and 2.0 by default, the values of App. C.2. Small images have "
            "others (App. C.1)",
            "t of the radial basis function (Eq. 13) is not stated: 2.0",
            "App. B.5 has the RBF cost for the repulsion alone. cost=rbf has it for the attraction too, and "
            "cost=rbf_repulsion is the appendix and the authors' code: with pairs of views, a logarithm for each",
            "Algorithm 3 stops the gradient of the positives' weights, Eqs. 2 and 3 do not: detach_weights, off by "
            "default",
            "the authors' code for SimCLR views repels between pairs of views, one direction each: "
            "Pairs.from_views(views, negatives='view_pairs')",
        )
    },
)
class CACR(Objective):
    """Contrastive attraction and repulsion with conditional weights among positives and among negatives.

    Formula (CACR Eqs. 2-5), d2 = ||x - y||^2 = 2 - 2 cos of unit vectors, c = d2 or -e^{-rbf_t d2} (Eq. 13):
        L_CA =  mean_i sum_{p in P(i)} [ e^{+t_pos d2_ip} / sum_{p'} e^{+t_pos d2_ip'} ] c_ip
        L_CR = -mean_i sum_{j in N(i)} [ e^{-t_neg d2_ij} / sum_{j'} e^{-t_neg d2_ij'} ] c_ij
        L = L_CA + L_CR;   RBF: L_CR = log( mean_i sum_j pi-_ij e^{-rbf_t d2_ij} )   (Eq. 14)

    Args:
        t_pos: sharpness of the positives' weights, >= 0.
        t_neg: sharpness of the negatives' weights, >= 0.
        k: number of positives used, >= 1. None uses all.
        cost: "euclidean" (squared distance), "rbf", or "rbf_repulsion": the RBF cost for the negatives alone.
        rbf_t: precision of the RBF cost, > 0.
        positive_weights: "contrastive", "uniform" or "reversed" (flips the sign of the exponent, Table 8).
        negative_weights: the same for the negatives. Uniform for both is UAUR (Eq. 11).
        detach_weights: no gradient through the positives' weights (Algorithm 3).
        intra_batch: other queries are negatives too, in addition to the keys and the queue (App. C.2).

    Raises:
        PairsError: if there are fewer than `k` positives. Anchors at the ends of documents of `Pairs.from_window` may
            have fewer.

    View pairs: `Pairs.from_views(views, negatives="view_pairs")` is the authors' code for SimCLR views (CACR-SSL,
    small_scale_experiments). L_CA is the mean over all views and images, with the image's other views as positives.
    L_CR is the mean over pairs of views x < y and images, with the other images of view y as negatives of view x. Two
    views are `Pairs.cross(z1, z2)`.

    Relations: t_pos = t_neg = 0 equals uniform weights (UAUR), and `triplet(margin=4)` minus 4. As both grow, it tends
    to `triplet(mode=hardest, margin=4)` minus 4. With uniform negatives, `cost=rbf` has the repulsion of
    `align_uniform(uniform_over=pairs)`.
    """

    weighting = "rows"

    def __init__(
        self,
        t_pos: Annotated[float, Range(at_least=0), "sharpness of the positives' weights"] = 1.0,
        t_neg: Annotated[float, Range(at_least=0), "sharpness of the negatives' weights"] = 2.0,
        k: Annotated[int | None, Range(at_least=1), "positives used, none for all"] = None,
        cost: Annotated[
            Literal["euclidean", "rbf", "rbf_repulsion"], "squared distance, its Gaussian kernel, or that of negatives"
        ] = "euclidean",
        rbf_t: Annotated[float, Range(above=0), "precision of the RBF cost"] = 2.0,
        positive_weights: Annotated[Weights, "how positives count, reversed flips the sign (Table 8)"] = "contrastive",
        negative_weights: Annotated[Weights, "how negatives count, uniform for both is UAUR (Eq. 11)"] = "contrastive",
        detach_weights: Annotated[bool, "no gradient through the positives' weights (Algorithm 3)"] = False,
        intra_batch: Annotated[bool, "other queries are negatives too (App. C.2)"] = False,
    ) -> None:
        super().__init__("cosine")
        self.t_pos = t_pos
        self.t_neg = t_neg
        self.k = k
        self.cost = cost
        self.rbf_t = rbf_t
        self.positive_weights = positive_weights
        self.negative_weights = negative_weights
        self.detach_weights = detach_weights
        self.intra_batch = intra_batch

    def prepare(self, pairs: Pairs) -> Pairs:
        if self.k is not None:
            if not pairs.facts.view_pairs:
                pairs.check_positives(self.k, self._too_few)
            elif self.k >= len(pairs.facts.candidate_views):
                raise PairsError(self._too_few(len(pairs.facts.candidate_views) - 1))
            if self.k < pairs.positives.shape[1]:
                pairs = pairs.first_positives(self.k)
        if self.intra_batch:
            return pairs.with_intra_batch()
        return pairs

    def _too_few(self, found: int) -> str:
        return (
            f"cacr(k={self.k}) needs {self.k} positives for each anchor, the pairs have {found}: use "
            f"{(self.k or 0) + 1} views (or k=none to use all)."
        )

    @property
    def positives_wanted(self) -> int | None:
        return self.k

    def weights(self) -> tuple[float, float]:
        return _SIGN[self.positive_weights] * self.t_pos, _SIGN[self.negative_weights] * self.t_neg

    @property
    def _scale(self) -> float:
        # e^{-t_neg d2} is e^{2 t_neg s} up to a factor that cancels in the weights.
        return 2 * self.weights()[1]

    def statistics(self) -> dict[str, AnyStatistic]:
        if self.cost != "euclidean":
            return {"weights": LogSumExp(self._scale), "weighted": LogSumExp(self._scale + 2 * self.rbf_t)}
        if self._scale:
            return {"near": SoftmaxMean(self._scale)}
        return {"total": Sum()}

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        if rows.pairs.facts.view_pairs:
            attracted = self._attraction_of_views(rows)
        else:
            attracted = self._attraction(positive, rows.pairs.positive_mask)
        if self.cost != "euclidean":
            kernel = rows.weighted - rows.weights - 2 * self.rbf_t  # log sum_j pi-_ij e^{-rbf_t d2_ij}, (A,)
            some = rows.count > 0
            if rows.pairs.positive_mask is not None:
                some = some & rows.pairs.positive_mask.any(1)
            logs = torch.where(some, torch.where(some, kernel, 0.0), -torch.inf)
            return rows.mean(attracted) + self._repulsion(logs, some, rows)
        near = rows.near if self._scale else rows.total / rows.count.clamp_min(1)  # sum_j pi-_ij s_ij, (A,)
        return attracted - (2 - 2 * near)

    def _repulsion(self, logs: Tensor, some: Tensor, rows: Rows) -> Tensor:
        """Return the log mean over anchors, or the mean of those of each pair of views, as in the authors' code."""
        facts = rows.pairs.facts
        if self.cost == "rbf" or not facts.view_pairs:
            return rows.log_mean_exp(logs, some)
        numbered = tuple((number, count) for number, (_, count) in enumerate(facts.anchor_views))
        run = views_of(numbered, logs.device)
        of_runs = []
        for number, _ in numbered:
            of_runs.append(rows.log_mean_exp(torch.where(run == number, logs, -torch.inf), some & (run == number)))
        return torch.stack(of_runs).mean()

    def _attraction(self, positive: Tensor, mask: Tensor | None) -> Tensor:
        """Return the attraction (n,) of rows from the cosines (n, K) of their positives."""
        squared = 2 - 2 * positive
        cost = -(-self.rbf_t * squared).exp() if self.cost == "rbf" else squared
        return attraction(squared, cost, self.weights()[0], self.detach_weights, mask)

    def _attraction_of_views(self, rows: Rows) -> Tensor:
        """Return for each anchor the mean attraction of its own row and its positive, (A,).

        Each row is in as many pairs of views, so the mean over anchors is the mean over all rows of all views.
        """
        runs = rows.pairs.facts.candidate_views
        index = other_views(torch.arange(len(rows.y), device=rows.y.device).unsqueeze(1), runs[0][1])[:, : self.k]
        of_rows = self._attraction(listed_similarities(rows.y, rows.y, index), None)  # (V B,)
        both = torch.stack([rows.pairs.ignored[:, 0], rows.pairs.positives[:, 0]])
        return of_rows[both].mean(0)
