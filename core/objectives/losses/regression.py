"""Regression of one embedding on another, without negatives. The framework has to prevent collapse."""

from torch import Tensor

from dipole.core.objectives.losses.align_uniform import align
from dipole.core.objectives.objective import Objective, Rows
from dipole.core.objectives.registry import register


@register(
    "regression",
    aliases=("byol",),
    formula="L_i = mean_{p in P(i)} || a_i / |a_i| - c_p / |c_p| ||^2 = mean_{p in P(i)} 2 - 2 cos(a_i, c_p)",
    source="Grill et al. 2020, Eq. 2 (BYOL); Chen & He 2021, Eq. 1 (SimSiam): L = 2 D + 2",
    deviations={
        "Grill et al. 2020": ("the two directions are averaged. The paper adds them: 2*regression is the paper's",),
        "Chen & He 2021": ("2 + 2 D has twice the gradient: 0.5*regression has the paper's",),
    },
    cost="rows x positives, no similarity matrix",
)
class Regression(Objective):
    """Squared distance of unit vectors to the positives, without repulsion: BYOL's and SimSiam's loss.

    Formula (Grill et al. 2020, Eq. 2):
        L_i = mean_{p in P(i)} 2 - 2 cos(a_i, c_p)

    Its minimum is all embeddings at one point. Use it in frameworks that stop the gradient of the positives and put a
    predictor before the anchors (`vision.method` `byol` and `simsiam`). Elsewhere embeddings collapse.

    Relations: the alignment of `align_uniform` with alpha = 2.
    """

    needs_negatives = False
    weighting = "pairs"

    def __init__(self) -> None:
        super().__init__("cosine")

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        return rows.over_positives(align(positive, 2.0))
