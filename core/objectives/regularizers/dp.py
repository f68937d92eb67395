"""Distance polarization: make distances between instances small or large, not in between."""

from typing import Annotated, Literal

from torch import Tensor

from dipole.core.objectives.objective import Objective, Rows
from dipole.core.objectives.registry import register
from dipole.core.objectives.spec import Range
from dipole.core.objectives.statistics import AnyStatistic, Between
from dipole.core.objectives.term_values import or_one
from dipole.core.utils.errors import OptionError

Distance = Annotated[float, Range(at_least=0, at_most=1), "normalised distance D = (1 - cos) / 2"]


def check_margin(owner: str, delta_pos: float, delta_neg: float) -> None:
    """Raise OptionError unless the lower end of a margin is below the upper one."""
    if delta_pos >= delta_neg:
        raise OptionError(
            f"{owner}: delta_pos must be < delta_neg, got {delta_pos:g} and {delta_neg:g}; the margin between them is "
            "what is cleared (LMCL: 0.1 and 0.5).",
            "delta_pos",
        )


def polarization(similarity: Tensor, delta_pos: float, delta_neg: float) -> Tensor:
    """Return g(D) = |min( (D - delta_pos)(D - delta_neg), 0 )| of cosines."""
    distance = (1 - similarity) / 2
    return ((distance - delta_pos) * (delta_neg - distance)).clamp_min(0)


@register(
    "dp",
    kind="regularizer",
    aliases=("distance_polarization",),
    weight=0.1,
    formula="R = mean_ij | min( (D_ij - delta_pos)(D_ij - delta_neg), 0 ) |, D = (1 - cos) / 2",
    source="LMCL Eqs. 6-10; lambda = 0.1 (Sec. 5)",
    deviations={
        "LMCL": (
            "the mean over pairs, where Eq. 10 prints a sum with a free first index and binomial factors: as a sum, "
            "lambda = 5 of Table 3 pulls 550 times as hard as InfoNCE, and the pull grows with the negatives of Fig. 4 "
            "and Table 2. reduction=anchor_sum and sum are the sums. Against the mean: Table 3 prints an accuracy for "
            "lambda = 0.01, where a mean does next to nothing",
            "a view and its own augmentation are not a pair: the paper's pairs are of original instances",
        )
    },
)
class DP(Objective):
    """Distance polarization: penalise distances inside the margin (delta_pos, delta_neg).

    Formula (LMCL Eqs. 7-10), D = (1 - cos) / 2, over all pairs of distinct instances:
        g(D) = | min( (D - delta_pos)(D - delta_neg), 0 ) |
        mean: average of g over all pairs;   anchor_sum: R = mean_i sum_j g(D_ij);   sum: sum of g over all (i, j)

    Args:
        delta_pos: lower end of the margin, in [0, 1].
        delta_neg: upper end of the margin, in [0, 1], above delta_pos.
        reduction: "mean" (default), "anchor_sum" (Eq. 10's inner sum, averaged over anchors) or "sum".

    Raises:
        OptionError: if delta_pos >= delta_neg.

    Relations: the reductions are proportional. `sum` is `anchor_sum` times the number of anchors. `mean` is
    `anchor_sum` over the number of other instances, if all anchors have the same number.

    Source: the paper writes R as an l1 norm (footnote 3) and as a sum with a free first index (Eq. 10). Only the mean
    agrees with its experiments: lambda from 0.01 to 5 (Table 3) and 32 to 4,096 negatives (Fig. 4, Table 2) change
    the accuracy by little. As a sum, lambda = 0.1 pulls 11 times as hard as InfoNCE at batch 256 and embeddings
    collapse at lambda = 0.3 (docs/results/polarization.md). A view and its own augmentation are not a pair.
    """

    positives_are_pairs = True
    weighting = "rows"

    def __init__(
        self,
        delta_pos: Distance = 0.1,
        delta_neg: Distance = 0.5,
        reduction: Annotated[Literal["mean", "anchor_sum", "sum"], "how pairs are added up"] = "mean",
    ) -> None:
        super().__init__("cosine")
        check_margin("dp", delta_pos, delta_neg)
        self.delta_pos = delta_pos
        self.delta_neg = delta_neg
        self.reduction = reduction

    def statistics(self) -> dict[str, AnyStatistic]:
        # In cosines, g(D) = (D - delta_pos)(delta_neg - D) is (1 - 2 delta_pos - s)(s - 1 + 2 delta_neg) / 4.
        return {"inside": Between(1 - 2 * self.delta_neg, 1 - 2 * self.delta_pos)}

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        total, count = rows.inside / 4, rows.count  # (A,)
        if not rows.pairs.views:
            # Neighbours and block members are separate instances.
            own = rows.only_positives(polarization(positive, self.delta_pos, self.delta_neg), 0.0)
            total = total + own.sum(1)
            count = count + rows.positive_count
        if self.reduction == "mean":
            return rows.sum_over_all(total) / or_one(rows.sum_over_all(count))
        if self.reduction == "anchor_sum":
            return rows.mean_over_all(total)
        return rows.sum_over_all(total)
