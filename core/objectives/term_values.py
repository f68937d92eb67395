"""Evaluate several terms on the pairs of a batch. Terms that use the same similarities share one pass."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dipole.core.objectives.checks import shape_of
from dipole.core.objectives.engine import similarities
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.similarity import Factors, full_precision, listed_similarities
from dipole.core.objectives.statistics import AnyStatistic, Extreme, Statistic
from dipole.core.utils.distributed import all_sum, log_mean_exp, world_size
from dipole.core.utils.errors import PairsError
from dipole.core.utils.text import counted

Objective = Any  # `Objective`, whose module imports this one: an import here would be a cycle
NO_NEGATIVES = "0: no anchor has a negative (every candidate is a positive or ignored)"


@dataclass(frozen=True)
class GlobalPairs:
    """The pairs of the global batch and the position of this rank's rows in it."""

    pairs: tuple[Pairs, ...]  # one or several, each over the rows of all ranks
    own: slice | None = None  # this rank's rows among `total`. None in a single process
    total: int = 0  # rows of the global batch
    # The encoder's features of each view, rows of all ranks. Empty if the embeddings are the features.
    features: tuple[Tensor, ...] = ()

    def local(self, pairs: Pairs, *, extra: bool = False) -> Pairs:
        """Return pairs over the rows of all ranks with only this rank's anchors.

        Extra pairs of a term that cannot be split by rows keep all anchors. A sum over ranks then counts each anchor
        equally often, so a mean stays correct in value and gradient.
        """
        if self.own is None:
            return pairs
        if len(pairs.anchors) % self.total == 0:
            return pairs.narrow(self.own, self.total)
        if extra:
            return pairs
        raise PairsError(
            f"{counted(len(pairs.anchors), 'anchor')} were made of a batch of {counted(self.total, 'row')} over all "
            "ranks; a `relate` or a term that leaves anchors out must keep their rows and pad their positives with -1."
        )

    @property
    def local_pairs(self) -> tuple[Pairs, ...]:
        """All pairs, with only this rank's anchors."""
        return tuple(map(self.local, self.pairs))


@dataclass
class _Matrix:
    """One similarity matrix and the statistics that all terms ask of it."""

    pairs: Pairs  # this rank's anchors
    factors: Factors
    wanted: list[AnyStatistic] | None = None  # None if no term uses the similarities
    found: dict[AnyStatistic, Tensor] = field(default_factory=dict)
    positive: Tensor | None = None  # (A, K)


class Rows:
    """The rows of the similarity matrix, as `Objective.loss` gets them.

    Each statistic from `Objective.statistics` is an attribute, `rows.NAME`, (A,).

    Attributes:
        pairs: this rank's anchors (A, d), and the candidates (C, d) of all ranks.
        x: (A, h) projected anchors: unit vectors for cosine, a_i^T W for bilinear.
        y: (C, h) projected candidates.
        extra_pairs: the rows of the pairs that `Objective.extra_pairs` returned.
        features: the encoder's features of each view of all ranks, (B, H) each, for terms with `on_features`. They are
            the embeddings unless `EncodedBatch.features` names others. Every rank has the same.

    Args:
        matrix: the similarities and their statistics.
        asked: the declared statistics, by name.
        extra_pairs: rows of other pairs.
        features: as the attribute.
        weighs: whether means apply `pairs.weights`. Not for a term that reads them itself (`Objective.weighting`).

    Raises:
        AttributeError: the statistic was not declared. The message lists the declared ones.

    Example:
        >>> class HardestNegative(dipole.Objective):
        ...     def __init__(self):
        ...         super().__init__("cosine")
        ...     def statistics(self):
        ...         return {"hardest": dipole.Extreme()}
        ...     def loss(self, positive, rows):  # positive (A, K), rows.hardest (A,)
        ...         negative = rows.similarity(rows.hardest.unsqueeze(1))
        ...         return rows.over_positives((negative - positive).exp())
        >>> dipole.Composite([HardestNegative()], [1.0])(torch.eye(4), torch.eye(4)).loss  # e^-1
        tensor(0.3679)
    """

    def __init__(
        self,
        matrix: _Matrix,
        asked: Mapping[str, AnyStatistic],
        extra_pairs: tuple["Rows", ...] = (),
        features: tuple[Tensor, ...] = (),
        weighs: bool = True,
    ) -> None:
        self.pairs, self.x, self.y = matrix.pairs, matrix.factors.x, matrix.factors.y
        self._weights = matrix.pairs.weights if weighs else None
        self.extra_pairs = extra_pairs
        self.features = features
        self.notes: list[str] = []
        self._values = {name: matrix.found[statistic] for name, statistic in asked.items()}

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"no row statistic {name!r}; declared: {', '.join(self._values) or 'none'}") from None

    def note(self, reason: str) -> None:
        """Record why the value of `loss` is 0 without learning. `TermValue.note` shows the reason.

        The terminal and the record of a run show a note that every step gave. Use only sizes in it, because reading a
        tensor would wait for the device.

        Args:
            reason: the text. It is prefixed with "0: ".
        """
        self.notes.append(f"0: {reason}")

    @property
    def count(self) -> Tensor:
        """Number of negatives of each anchor, (A,), in the embeddings' dtype."""
        return self.pairs.negative_counts.to(self.x.dtype)

    @property
    def positive_count(self) -> Tensor:
        """Number of positives of each anchor, (A,), in the embeddings' dtype."""
        return (self.pairs.positives >= 0).sum(1).to(self.x.dtype)

    def similarity(self, index: Tensor) -> Tensor:
        """Return the similarities (A, n) with the listed candidates, with gradient.

        Args:
            index: (A, n) torch.long, indices of candidates. -1 is read as candidate 0.
        """
        return listed_similarities(self.x, self.y, index)

    def over_positives(self, values: Tensor) -> Tensor:
        """Average over the positives of each anchor, (A,), with weights (A, K) if the pairs have them.

        An anchor without positives, or with weights of 0 alone, gets 0.

        Args:
            values: (A, K). Padding is ignored.
        """
        mask, weights = self.pairs.positive_mask, self._weights
        if weights is None or weights.ndim == 1:
            if mask is None:
                return values.squeeze(1) if values.shape[1] == 1 else values.mean(1)
            weights = mask.to(values.dtype)
        return _weighted_mean(self.only_positives(values, 0.0), self.only_positives(weights, 0.0), 1)

    def only_positives(self, values: Tensor, fill: float) -> Tensor:
        """Replace the values at padding by a number. Return (A, K).

        Args:
            values: (A, K).
            fill: value at padding, such as inf before a minimum.
        """
        mask = self.pairs.positive_mask
        if mask is None:
            return values
        return torch.where(mask, values, fill)

    def _anchor_weights(self) -> Tensor:
        """Return the weights of the anchors, (A,): 1, w, or the sum of w over the positives of an anchor."""
        if self._weights is None:
            return self.x.new_ones(len(self.x))
        if self._weights.ndim == 1:
            return self._weights
        return self.only_positives(self._weights, 0.0).sum(1)

    def mean(self, values: Tensor) -> Tensor:
        """Average over the anchors of all ranks that have a positive, (). If K = 0, average over all anchors.

        With weights this is sum w L / sum w, where weights (A, K) of an anchor are summed. It is 0 if all are 0.

        Args:
            values: (A,).
        """
        mask = self.pairs.positive_mask
        if mask is None:
            return self.mean_over_all(values)
        has = mask.any(1)
        return _weighted_mean(torch.where(has, values, 0.0), torch.where(has, self._anchor_weights(), 0.0))

    def mean_over_pairs(self, values: Tensor) -> Tensor:
        """Average over all pairs of an anchor and a positive, of all ranks, (). Each pair counts by its weight.

        Without weights, each pair counts alike. Weights (A,) are those of each pair of the anchor.

        Args:
            values: (A, K). Padding is ignored.
        """
        weights = self._weights
        if weights is None:
            weights = torch.ones_like(values)
        elif weights.ndim == 1:
            weights = weights.unsqueeze(1).expand_as(values)
        return _weighted_mean(self.only_positives(values, 0.0), self.only_positives(weights, 0.0))

    def mean_over_all(self, values: Tensor) -> Tensor:
        """Average over all anchors of all ranks, (), with their weights if the pairs have them.

        Args:
            values: (A,), or (A, K) with as many columns on every rank.
        """
        if self._weights is None and world_size() == 1:
            return values.mean()
        values = values.transpose(0, -1)  # (A,) or (K, A)
        return _weighted_mean(values, self._anchor_weights().expand_as(values))

    def log_mean_exp(self, logs: Tensor, counts: Tensor) -> Tensor:
        """Return log( sum_i w_i e^{logs_i} / sum_i w_i counts_i ) over all anchors of all ranks, ().

        It is 0 if the sum below is. Without weights, w is 1.

        Args:
            logs: (A,).
            counts: (A,), >= 0.
        """
        weights = self._anchor_weights()
        counts = counts * weights
        used = counts > 0
        some = all_sum(counts.sum()) > 0
        logs = torch.where(used, logs + torch.where(used, weights, 1.0).log(), torch.where(some, -torch.inf, 0.0))
        return torch.where(some, log_mean_exp(logs, torch.where(some, counts, 1.0)), 0.0)

    def sum_over_all(self, values: Tensor) -> Tensor:
        """Sum over all anchors of all ranks, (), times their weights if the pairs have them.

        Args:
            values: (A,).
        """
        if self._weights is not None:
            values = values * self._anchor_weights()
        return all_sum(values.sum())


_OWN_NAMES = frozenset((*dir(Rows), "pairs", "x", "y", "extra_pairs", "features", "notes"))


@dataclass(frozen=True)
class TermValue:
    """The value of one term.

    Args:
        value: (), unweighted.
        weight: weight of the term.
        note: why the value is 0 without learning, or "".
        left_out: (), number of anchors of all ranks without a positive. The term's mean leaves them out. None if every
            anchor has one.
    """

    value: Tensor
    weight: float
    note: str = ""
    left_out: Tensor | None = None

    def __float__(self) -> float:
        return float(self.value)


@dataclass(frozen=True)
class Outcome:
    """The result of an objective.

    Args:
        loss: (), the weighted sum of the terms, with gradient.
        terms: value of each term by name. Repeated names are numbered.
        weighted: weight times value of each term by name, (), with gradient. They sum to the loss.

    Example:
        >>> outcome = dipole.objective("infonce + 0.1*dp")(torch.randn(8, 4), torch.randn(8, 4))
        >>> list(outcome.terms)
        ['infonce', 'dp']
    """

    loss: Tensor
    terms: dict[str, TermValue]
    weighted: dict[str, Tensor] = field(default_factory=dict, repr=False)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"an Outcome has no {name!r}. Its loss is a tensor, as in objective(z1, z2).loss.")


def has_repulsion(term: Objective, pairs: Pairs) -> bool | None:
    """Return whether any anchor has a negative, or a positive that the term counts as one. None if unknown."""
    found = pairs.has_negatives
    if found or pairs.views or not term.positives_are_pairs or pairs.has_positives is False:
        return found
    return pairs.has_positives


def evaluate_terms(terms: Mapping[str, tuple[float, Objective]], batch: GlobalPairs) -> Outcome:
    """Return the weighted sum of the terms, averaged over all Pairs of a batch and over all ranks' anchors.

    Pairs with `Pairs.added` are added instead. Raises PairsError if the pairs cannot carry a term.
    """
    # Autocast is meant for the encoder. A loss keeps the precision of its formula.
    with without_autocast(batch.pairs[0].anchors.device.type):
        found = []
        for pairs in batch.pairs:  # no comprehension: torch.compile cannot resume in one that walks over a tuple
            found.append(_values_on(terms, pairs, batch))
    values = found[0]
    if len(found) > 1:
        added = batch.pairs[0].facts.added
        values = {name: _over_pairs([each[name] for each in found], added) for name in terms}
    weighted = {name: v.value if v.weight == 1 else v.weight * v.value for name, v in values.items()}
    parts = list(weighted.values())
    return Outcome(
        sum(parts[1:], parts[0]),
        {name: TermValue(v.value.detach(), v.weight, v.note, v.left_out) for name, v in values.items()},
        weighted,
    )


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Compute in the precision of the tensors inside the block. Some devices have no autocast (meta)."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def or_one(total: Tensor) -> Tensor:
    """Return a sum of weights >= 0 to divide by: 1 where it is 0."""
    return torch.where(total > 0, total, 1)


def _weighted_mean(values: Tensor, weights: Tensor, dim: int | None = None) -> Tensor:
    """Return sum w v / sum w along a dimension, or over all rows of all ranks. It is 0 where all weights are 0."""
    if dim is None:
        return all_sum((values * weights).sum()) / or_one(all_sum(weights.sum()))
    return (values * weights).sum(dim) / or_one(weights.sum(dim))


def _values_on(terms: Mapping[str, tuple[float, Objective]], pairs: Pairs, batch: GlobalPairs) -> dict[str, TermValue]:
    """Return the value of each term on one Pairs of the batch. Terms with the same similarity share a matrix."""
    matrices: dict[tuple[int, object], _Matrix] = {}
    waiting: dict[str, Callable[[], TermValue]] = {}
    for name, (weight, term) in terms.items():
        features: tuple[Tensor, ...] = ()
        if term.on_features:  # (B, H) of each view of all ranks. Without others they are the embeddings
            features = tuple([full_precision(each.flatten(0, -2)) for each in batch.features or pairs.batch_views()])
        prepared = _prepared(term, pairs)
        term.build_for(features[0] if features else pairs.anchors)
        note, asked = term.idle(prepared[0]), {}  # all ranks must agree on it
        if not note and prepared[0].has_positives is False and term.is_base():
            note = "0: no anchor has a positive"
        if note:
            prepared = prepared[:1]
        else:
            asked = asked_statistics(term)
        used = []
        for number, each in enumerate(prepared):
            key = id(each), term.matrix_key()  # `waiting` holds the pairs, so that no two have one id
            if key not in matrices:
                matrices[key] = _matrix_of(term, batch.local(each, extra=number > 0))
            matrix = matrices[key]
            if not note and term.similarity is not None:
                matrix.wanted = [*(matrix.wanted or []), *asked.values()]
            used.append(matrix)
        waiting[name] = partial(_value, term, weight, note, prepared, used, asked, features)
    for m in matrices.values():
        if m.wanted is not None:
            m.positive, m.found = similarities(m.factors, m.pairs, m.wanted)
    return {name: value() for name, value in waiting.items()}


def asked_statistics(term: Objective) -> dict[str, AnyStatistic]:
    """Return the row statistics that a term asks for. Raises PairsError if they are none."""
    asked: Mapping[str, AnyStatistic] = term.statistics()
    fine = isinstance(asked, Mapping) and all(isinstance(each, (Statistic, Extreme)) for each in asked.values())
    _demand(term, "statistics", fine, "row statistics by name, such as {'negatives': dipole.LogSumExp(2.0)}", asked)
    for name in asked.keys() & _OWN_NAMES:
        raise PairsError(f"{term.registered_name()}: rows.{name} is no statistic. Give the statistic another name.")
    return dict(asked)


def _demand(term: Objective, hook: str, fine: bool, wanted: str, got: Any) -> None:
    """Raise PairsError if a hook of a term returned something else than it must."""
    if not fine:
        raise PairsError(f"{term.registered_name()}: {hook} must return {wanted}, got {shape_of(got)}.")


def _prepared(term: Objective, pairs: Pairs) -> tuple[Pairs, ...]:
    """Return the pairs of a term, its own first. Raises PairsError if it cannot use their weights."""
    if pairs.weights is not None and pairs.weights.ndim == 2 and term.weighting not in ("pairs", "own"):
        name = term.registered_name()
        raise PairsError(
            f"{name} cannot use weights of pairs, (A, K): its value is no mean over pairs. Try weights of rows, (A,), "
            f"or leave out the weights or {name}."
        )
    own, extra = term.prepare(pairs), term.extra_pairs(pairs)
    _demand(term, "prepare", isinstance(own, Pairs), "Pairs", own)
    fine = isinstance(extra, (tuple, list)) and all(isinstance(each, Pairs) for each in extra)
    _demand(term, "extra_pairs", fine, "a tuple of Pairs", extra)
    if pairs.weights is not None and term.weighting != "own" and any(each.weights is None for each in (own, *extra)):
        name = term.registered_name()
        raise PairsError(f"{name} cannot use weights: its own pairs have none. Leave out the weights or {name}.")
    return own, *extra


def _matrix_of(term: Objective, pairs: Pairs) -> _Matrix:
    if term.similarity is None:
        x = full_precision(pairs.anchors)
        return _Matrix(pairs, Factors(x, x))
    embeddings = (pairs.anchors, pairs.candidates) if term.keeps_directions else None
    projected = term.project(pairs)
    fine = isinstance(projected, (tuple, list)) and len(projected) == 3
    _demand(term, "project", fine, "x (A, h), y (C, h) and a bound or None", projected)
    x, y, bound = projected
    return _Matrix(pairs, Factors(x, y, bound, embeddings))


def _value(
    term: Objective,
    weight: float,
    note: str,
    prepared: tuple[Pairs, ...],
    matrices: list[_Matrix],
    asked: dict[str, AnyStatistic],
    features: tuple[Tensor, ...],
) -> TermValue:
    """Return the value of a term, 0 with a note. `prepared` are its pairs with all ranks' anchors, its own first."""
    matrix, weighs, left_out = matrices[0], term.weighting != "own", _left_out(term, prepared[0])
    x = matrix.factors.x
    if note:
        return TermValue((x * 0.0).sum(), weight, note, left_out)
    others = tuple([Rows(other, asked, weighs=weighs) for other in matrices[1:]])
    rows = Rows(matrix, asked, others, features, weighs)
    value = term.loss(x if matrix.positive is None else matrix.positive, rows)
    fine = isinstance(value, Tensor) and value.shape in ((), (len(x),))
    _demand(term, "loss", fine, f"one value for each anchor, ({len(x)},), or a scalar, ()", value)
    if value.ndim:
        if term.needs_negatives and matrix.pairs.facts.padded:
            # Some anchors may have no negative. Without padding, all have one or none has.
            value = value.masked_fill(matrix.pairs.negative_counts == 0, 0.0)
        value = rows.mean(value)
    elif matrix.pairs.weights is not None and term.weighting is None:
        name = term.registered_name()
        raise PairsError(
            f"{name} cannot use weights: its value is no mean over rows. Leave out the weights or {name}. A term of "
            "your own can set `weighting` (docs/how-to/own-losses.md)."
        )
    elif term.needs_negatives and has_repulsion(term, prepared[0]) is None and not _reads_repulsion(term, prepared[0]):
        # A finished scalar cannot be masked. This one case, lists as long as the candidates, reads from the device.
        return TermValue((x * 0.0).sum(), weight, NO_NEGATIVES, left_out)
    return TermValue(value, weight, "; ".join(rows.notes), left_out)


def _reads_repulsion(term: Objective, pairs: Pairs) -> bool:
    """Read the answer of `has_repulsion` from the device."""
    count = pairs.negative_counts.sum()
    if term.positives_are_pairs and not pairs.views:
        count = count + (pairs.positives >= 0).sum()
    return bool(count > 0)


def _left_out(term: Objective, pairs: Pairs) -> Tensor | None:
    """Return how many anchors of all ranks have no positive, if the term averages over those that have one."""
    mask = pairs.positive_mask
    if mask is None or not term.is_base():
        return None
    return len(mask) - mask.any(1).sum()


def _over_pairs(values: list[TermValue], added: bool) -> TermValue:
    """Return one term's mean over several Pairs, or its sum, with the note that all of them share."""
    notes = {each.note for each in values}
    several = torch.stack([each.value for each in values])
    value = several.sum() if added else several.mean()
    counts = [each.left_out for each in values if each.left_out is not None]
    left_out = torch.stack(counts).sum() if counts else None
    return TermValue(value, values[0].weight, notes.pop() if len(notes) == 1 else "", left_out)
