"""The supervised (n+1)-tuple loss: InfoNCE whose positives are given by labels."""

import torch
from torch import Tensor

from dipole.core.objectives.indices import is_listed, same_label
from dipole.core.objectives.losses.infonce import InfoNCE, Init, Temperature
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.registry import register
from dipole.core.utils.errors import PairsError
from dipole.core.utils.text import counted


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
