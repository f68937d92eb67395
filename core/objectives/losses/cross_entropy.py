"""Cross entropy on labels, the supervised reference for contrastive representations."""

from typing import Annotated

from torch import nn
from torch.nn.parameter import UninitializedParameter

from dipole.core.objectives.checks import check_numbers
from dipole.core.objectives.losses.infonce import InfoNCE
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.registry import register
from dipole.core.objectives.similarity import full_precision
from dipole.core.objectives.spec import Range
from dipole.core.utils.errors import PairsError


@register(
    "cross_entropy",
    aliases=("softmax",),
    formula="L_i = -log( e^{a_i . w_{y_i}} / sum_{c=1..C} e^{a_i . w_c} )",
    source="Arora et al. 2019, Sec. 8.1 (the supervised models of Table 1)",
    deviations={"Arora et al. 2019": ("the output layer has no bias",)},
    cost="one product with the class vectors: (rows x classes)",
)
class CrossEntropy(InfoNCE):
    """Supervised cross entropy: InfoNCE whose candidates are the classes, with one learnt vector each.

    Formula (Arora et al. 2019, Sec. 8.1):
        L_i = -log( e^{a_i . w_{y_i}} / sum_{c=1..C} e^{a_i . w_c} )

    Args:
        classes: C >= 2. Labels are 0 to C - 1.

    Raises:
        PairsError: if the pairs have no labels, a label is outside 0..C-1, or the width of the embeddings changes.
        OptionError: if the class vectors would not fit into memory.

    Relations: this is a linear output layer without bias. `tuple` is the supervised reference without class vectors.
    """

    weighting = None  # weights of pairs would be those of other positives

    def __init__(self, classes: Annotated[int, Range(at_least=2), "number of classes C"] = 100) -> None:
        super().__init__(temperature=1.0, similarity="dot")
        self.classes = classes
        self.vectors = UninitializedParameter()

    def build(self, dim: int) -> None:
        # Initialise as a linear layer: uniform within 1 / sqrt(dim).
        self.materialize("vectors", (self.classes, dim), lambda w: nn.init.kaiming_uniform_(w, a=5**0.5))

    def prepare(self, pairs: Pairs) -> Pairs:
        if pairs.labels is None:
            raise PairsError("cross_entropy is supervised and needs labels: Pairs.from_views(views, labels=labels).")
        labels = pairs.labels.long()
        check_numbers(
            labels,
            0,
            self.classes - 1,
            lambda low, high: (
                f"cross_entropy(classes={self.classes}) takes labels 0 to {self.classes - 1}, got {low} to {high}; "
                f"{'leave unlabelled rows out' if low < 0 else f'set classes={high + 1} or more'}."
            ),
        )
        own = labels.unsqueeze(1)  # (A, 1)
        return pairs.against(self.vectors.to(full_precision(pairs.anchors).dtype), own, own[:, :0])
