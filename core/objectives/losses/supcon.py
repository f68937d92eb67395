"""Supervised contrast: SupCon, one softmax over all other rows, and the (n+1)-tuple loss, one for each positive."""

from typing import Annotated, Literal

import torch
from torch import Tensor

from dipole.core.objectives.checks import reads_at_once
from dipole.core.objectives.indices import is_listed, same_label
from dipole.core.objectives.losses.infonce import (
    InfoNCE,
    Init,
    SimilarityOption,
    Temperature,
    Tempered,
    joint_softmax,
    log_sum_of_positives,
    one_against_many,
)
from dipole.core.objectives.objective import Rows
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.registry import register
from dipole.core.objectives.statistics import AnyStatistic, log_sum_exp
from dipole.core.objectives.term_values import NO_NEGATIVES
from dipole.core.utils.errors import PairsError
from dipole.core.utils.text import counted


@register(
    "supcon",
    aliases=("sup_con", "supervised_contrast"),
    formula="out: L_i = mean_{p in P(i)} -log( e^{s_ip/tau} / sum_{a != i} e^{s_ia/tau} ); in: log of the mean over p",
    source="Khosla et al. 2020, Eqs. 2 (out) and 3 (in)",
    deviations={
        "Khosla et al. 2020": (
            "their code multiplies the loss by tau / base_tau = tau / 0.07, a weight of the term here: "
            "1.43*supcon(temperature=0.1); the paper's equations do not",
            "anchors without a positive are left out of the mean. In their code they count as 0",
        )
    },
    cost="one pass; the lists of positives take (rows x largest class) entries",
)
class SupCon(Tempered):
    """Supervised contrastive loss: all rows of the anchor's class are targets of one softmax over all other rows.

    Formula (Khosla et al. 2020, Eqs. 2 and 3), A(i) = P(i) + N(i):
        out: L_i = mean_{p in P(i)} -log( e^{s_ip/tau} / sum_{a in A(i)} e^{s_ia/tau} )
        in:  L_i = -log( mean_{p in P(i)} e^{s_ip/tau} / sum_{a in A(i)} e^{s_ia/tau} )
    The loss is the mean over the anchors that have a positive.

    If pairs have labels, the labels define the positives (`Pairs.from_labels`, or views with labels). A negative label
    means unknown: the positives of such a row are the other views of its instance. Without labels, the positives are
    those of the pairs.

    Args:
        temperature: tau > 0, or "learned". The paper uses 0.1.
        variant: "out", the sum over positives outside the logarithm, or "in".
        similarity: "cosine", "dot" or "bilinear".
        init: initial value of a learned temperature, >= 0.01. None means 0.07.

    Raises:
        PairsError: if anchors have labels and candidates have none (a queue).
        OptionError: if `init` is given without a learned temperature.

    Relations: `infonce(joint=true)` with the same positives is `out`. `tuple` has only one positive and the negatives
    in each softmax.
    """

    # A batch of one class has no negatives, and its positives still compete with one another.
    needs_negatives = False

    def __init__(
        self,
        temperature: Temperature = 0.1,
        variant: Annotated[Literal["out", "in"], "mean over positives outside or inside the logarithm"] = "out",
        similarity: SimilarityOption = "cosine",
        init: Init = None,
    ) -> None:
        super().__init__(similarity, temperature, init)
        self.variant = variant

    def prepare(self, pairs: Pairs) -> Pairs:
        if pairs.labels is None or pairs.facts.by_label:
            return pairs
        told = (pairs.labels >= 0).unsqueeze(1)
        same = torch.where(told, same_class("supcon", pairs), -1)
        return pairs.with_positives(torch.cat([same, torch.where(told, -1, pairs.positives)], 1))

    def idle(self, pairs: Pairs) -> str:
        # A single positive has the whole softmax.
        mask = pairs.positive_mask
        told = mask is not None and reads_at_once(mask)
        alone = pairs.positives.shape[1] == 1 or (told and mask is not None and bool((mask.sum(1) <= 1).all()))
        if alone and pairs.has_negatives is False:
            return NO_NEGATIVES
        return super().idle(pairs)

    def statistics(self) -> dict[str, AnyStatistic]:
        return {"negatives": log_sum_exp(1 / self.temperature)}

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        logits = positive / self.temperature  # (A, K)
        if self.variant == "out":
            return joint_softmax(logits, rows.negatives, rows)
        share = one_against_many(log_sum_of_positives(logits, rows), rows.negatives)
        return share + rows.positive_count.clamp_min(1).log()


def same_class(owner: str, pairs: Pairs) -> Tensor:
    """Return the candidates of each anchor's class that are not ignored, (A, n), padded with -1.

    Raises PairsError if labels of anchors or candidates are missing.
    """
    if pairs.labels is None:
        raise PairsError(f"{owner} is supervised and needs labels: Pairs.from_views(views, labels=labels).")
    if pairs.candidate_labels is None:
        raise PairsError(
            f"{owner} needs the label of every candidate, but there are {counted(len(pairs.candidates), 'candidate')} "
            f"and {counted(len(pairs.labels), 'label')} (a queue: give queue_labels); use Pairs.from_labels(z, labels) "
            "or Pairs.from_views(views, labels=labels)."
        )
    same = same_label(pairs.labels, pairs.candidate_labels)
    return torch.where(is_listed(same, pairs.ignored), -1, same)


@register(
    "tuple",
    aliases=("supervised", "n_tuple"),
    formula="L_i = mean_{p: y_p = y_i} -log( e^{s_ip/tau} / ( e^{s_ip/tau} + sum_{j: y_j != y_i} e^{s_ij/tau} ) )",
    source="LMCL Eq. 2, Fig. 2(b); Sohn 2016",
    deviations={
        "LMCL": (
            "Eq. 2 has raw dot products of unit vectors and no temperature: 0.5 by default",
            "Eq. 2 has one positive: the loss is the mean over all of the class",
        )
    },
    cost="one pass, and lists of positives with (rows x largest class) entries",
)
class Tuple(InfoNCE):
    """(n+1)-tuple loss, the supervised reference: positives share the anchor's label, negatives do not.

    Formula (LMCL Eq. 2):
        L_i = mean_{p: y_p = y_i} -log( e^{s_ip/tau} / ( e^{s_ip/tau} + sum_{j: y_j != y_i} e^{s_ij/tau} ) )

    Args:
        temperature: tau > 0, or "learned".
        init: initial value of a learned temperature, >= 0.01. None means 0.07.

    Raises:
        PairsError: if the pairs have no labels, or candidates whose labels are unknown (a queue).
        OptionError: if `init` is given without a learned temperature.

    Relations: equals `infonce` if every instance is its own class. `supcon` has the other positives in the denominator
    too.
    """

    weighting = None  # weights of pairs would be those of other positives

    def __init__(self, temperature: Temperature = 0.5, init: Init = None) -> None:
        super().__init__(temperature, init=init)

    def prepare(self, pairs: Pairs) -> Pairs:
        return pairs.with_positives(same_class("tuple", pairs))
