"""The value of several terms on the pairs of a batch: one sweep for all that look at the same similarities."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dipole.core.objectives import dense, engine
from dipole.core.objectives.gather import Related
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.similarity import full_precision, normalize, paired
from dipole.core.objectives.statistics import AnyStatistic
from dipole.core.objectives.sweep import row_statistics
from dipole.core.utils.distributed import all_sum, world_size

if TYPE_CHECKING:
    from dipole.core.objectives.objective import Objective


NO_NEGATIVES = "0: no anchor has a negative (every candidate is a positive or dropped)"


class Rows:
    """Row statistics of one term by the names it gave them, and what else it may ask about its pairs.

    A statistic is an attribute, `rows.NAME`, (A,). `Objective.loss` is handed one; nobody else makes any.

    Attributes:
        pairs: this rank's anchors (A, d), and the candidates (C, d) of all ranks.
        further: the rows of the pairs that `Objective.further` asked for.

    Args:
        matrix: the similarities that they are of.
        values: (A,) each, by name.
        further: rows of other pairs.

    Raises:
        AttributeError: for a statistic that was not asked for; the message has those that were.
    """

    def __init__(self, matrix: _Matrix, values: dict[str, Tensor], further: tuple[Rows, ...] = ()) -> None:
        self.pairs = matrix.pairs
        self.further = further
        self.notes: list[str] = []
        self._matrix = matrix
        self._values = values

    @property
    def x(self) -> Tensor:
        """(A, h) the anchors as the similarities see them: at length 1 for cosines, a_i^T W for bilinear ones."""
        return self._matrix.x

    @property
    def y(self) -> Tensor:
        """(C, h) the candidates likewise."""
        return self._matrix.y

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"no row statistic {name!r}; declared: {', '.join(self._values) or 'none'}") from None

    def note(self, reason: str) -> None:
        """Say why the value that `loss` returns is 0 without being learnt, as `TermValue.note` shows it.

        What a run has been told at every step is said on the terminal and in its record. The reason is text made of
        sizes: to ask tensors for their values would wait for the device.

        Args:
            reason: the text, without "0: ", which is put before it.
        """
        self.notes.append(f"0: {reason}")

    @property
    def count(self) -> Tensor:
        """(A,) number of negatives of each anchor, in the embeddings' dtype."""
        return self.pairs.negative_counts.to(self._matrix.dtype)

    def similarity(self, index: Tensor) -> Tensor:
        """Similarities (A, n) with the listed candidates, with gradient.

        Args:
            index: (A, n) torch.long, indices of candidates; -1 is read as candidate 0.
        """
        return paired(self.x, self.y, index)

    def over_positives(self, values: Tensor) -> Tensor:
        """Mean over the positives of each anchor, (A,); 0 for an anchor whose positives are all padding.

        Args:
            values: (A, K), of which padding is left out.
        """
        mask = self.pairs.positive_mask
        if mask is None:
            return values.squeeze(1) if values.shape[1] == 1 else values.mean(1)
        return torch.where(mask, values, 0.0).sum(1) / mask.sum(1).clamp_min(1)

    def only_positives(self, values: Tensor, fill: float) -> Tensor:
        """The same values with those of padding replaced by a number, (A, K).

        Args:
            values: (A, K).
            fill: what stands for padding, such as inf before a minimum.
        """
        mask = self.pairs.positive_mask
        return values if mask is None else torch.where(mask, values, fill)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the anchors of all ranks that have a positive, (); over all anchors where K = 0.

        Args:
            values: (A,).
        """
        mask = self.pairs.positive_mask
        if mask is None:
            return self.mean_over_all(values)
        has = mask.any(1)
        return all_sum(torch.where(has, values, 0.0).sum()) / all_sum(has.sum().to(values.dtype)).clamp_min(1)

    def mean_over_all(self, values: Tensor) -> Tensor:
        """Mean over all anchors, of all ranks, ().

        Args:
            values: (A,).
        """
        if world_size() == 1:
            return values.mean()
        return all_sum(values.sum()) / all_sum(values.new_full((), float(len(values))))


@dataclass(frozen=True)
class TermValue:
    """What one term contributed.

    Args:
        value: (), unweighted.
        weight: of the term.
        note: why the value is 0 without being learnt.
        left_out: (), the number of anchors of all ranks that have no positive, so that the term's mean leaves them out;
            None where every anchor has one.
    """

    value: Tensor
    weight: float
    note: str = ""
    left_out: Tensor | None = None

    def __float__(self) -> float:
        return float(self.value)


@dataclass(frozen=True)
class Outcome:
    """What an objective returns.

    Args:
        loss: () to descend, with gradient: the weighted sum of the terms.
        terms: what each term has contributed, by name; a name that occurs twice is numbered.
    """

    loss: Tensor
    terms: dict[str, TermValue]


def evaluate(terms: Mapping[str, tuple[float, Objective]], related: Related) -> Outcome:
    """Weighted sum of terms, the mean over all Pairs of a batch and over all ranks' anchors.

    Args:
        terms: weight and term by name.
        related: the pairs of all ranks.

    Raises:
        PairsError: if the pairs cannot carry a term.
    """
    # Whoever calls under autocast wants half precision in the encoder: a loss keeps the precision of its formula.
    with without_autocast(related.pairs[0].anchors.device.type):
        found = []
        for pairs in related.pairs:  # no comprehension: torch.compile cannot resume in one that walks over a tuple
            found.append(_on_pairs(terms, pairs, related))
    values = found[0] if len(found) == 1 else {name: _mean([each[name] for each in found]) for name in terms}
    weighted = [v.value if v.weight == 1 else v.weight * v.value for v in values.values()]
    return Outcome(
        sum(weighted[1:], weighted[0]),
        {name: TermValue(v.value.detach(), v.weight, v.note, v.left_out) for name, v in values.items()},
    )


def autocast_enabled(device: str) -> bool:
    """Whether operations on a kind of device run in lower precision; False where it knows no autocast (meta)."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Compute in the precision of the tensors, whoever calls."""
    return torch.autocast(device, enabled=False) if autocast_enabled(device) else nullcontext()


def _on_pairs(terms: Mapping[str, tuple[float, Objective]], pairs: Pairs, related: Related) -> dict[str, TermValue]:
    # The pairs a term looks at, those of its own anchors first.
    prepared: dict[str, tuple[Pairs, ...]] = {}
    # Terms that look at the same pairs look at the same narrowed pairs.
    local: dict[int, Pairs] = {}
    for name, (_, term) in terms.items():
        several = prepared[name] = term.prepare(pairs), *term.further(pairs)
        for each in several[1:]:
            local.setdefault(id(each), _share(related, each))
    for several in prepared.values():
        local[id(several[0])] = related.local(several[0])
    matrices: dict[object, _Matrix] = {}
    seen_by: dict[str, list[_Matrix]] = {}
    asked: dict[str, dict[str, AnyStatistic]] = {}
    for name, (_, term) in terms.items():
        term.build_for(pairs.anchors)
        asked[name] = term.statistics()
        seen_by[name] = []
        for each in prepared[name]:
            key = id(each), term.projection()
            if key not in matrices:
                matrices[key] = _Matrix.of(term, local[id(each)])
            matrices[key].wanted += asked[name].values()
            seen_by[name].append(matrices[key])
    for matrix in matrices.values():
        matrix.sweep()
    values = {}
    for name, (weight, term) in terms.items():
        value, note = _value(term, prepared[name][0], seen_by[name], asked[name])
        values[name] = TermValue(value, weight, note, _left_out(term, prepared[name][0]))
    return values


def _share(related: Related, pairs: Pairs) -> Pairs:
    """This rank's anchors of further pairs; all of them where they do not divide into the rows of the batch.

    A sum over all ranks then counts each anchor as often, in value and gradient, which a mean does not notice.
    """
    return pairs if related.own is None or len(pairs.anchors) % related.total else related.local(pairs)


class _Matrix:
    """One similarity matrix and the statistics that all terms looking at it have asked for.

    Of a matrix of cosines that is formed as a whole, `sides` are rows that nobody has normalised: it does that itself,
    and `x` and `y` are made where a term asks for them.
    """

    def __init__(self, pairs: Pairs, x: Tensor, y: Tensor, bound: float | None, unit: bool = False) -> None:
        self.pairs, self.sides, self.bound, self.unit = pairs, (x, y), bound, unit
        self.dtype = x.dtype
        self.embeddings: tuple[Tensor, Tensor] | None = None
        self.wanted: list[AnyStatistic] = []
        self.results: dict[AnyStatistic, Tensor] = {}

    @classmethod
    def of(cls, term: Objective, pairs: Pairs) -> _Matrix:
        if term.similarity is None:
            x = full_precision(pairs.anchors)
            return cls(pairs, x, x, None)
        if term.similarity == "cosine" and term.by_row:
            x, y = pairs.anchors, pairs.candidates
            if dense.fits(x.shape[0], y.shape[0]) and engine.wanted() != "triton":
                left = full_precision(x)
                return cls(pairs, left, left if x is y else full_precision(y), 1.0, unit=True)
        x, y, bound = term.project(pairs)
        matrix = cls(pairs, x, y, bound)
        if term.keeps_directions:
            matrix.embeddings = pairs.anchors, pairs.candidates
        return matrix

    def sweep(self) -> None:
        """All statistics that were asked for."""
        if not self.wanted:
            return
        x, y = self.sides
        symmetric = self.pairs.mutual and x is y
        if self.unit or (dense.fits(len(x), len(y)) and engine.wanted() != "triton"):
            self.positives, self.results = dense.whole(
                x,
                y,
                self.pairs.positives,
                self.pairs.excluded,
                list(dict.fromkeys(self.wanted)),
                padded=self.pairs.known.padded,
                first=self.pairs.first_negative,
                counts=self.pairs.negative_counts,
                bound=self.bound,
                symmetric=symmetric,
                unit=self.unit,
                full=not self.pairs.known.padded and self.pairs.has_negatives is True,
            )
        else:
            self.results = row_statistics(
                x,
                y,
                self.pairs.excluded,
                self.wanted,
                counts=self.pairs.negative_counts,
                bound=self.bound,
                symmetric=symmetric,
                first=self.pairs.first_negative,
                embeddings=self.embeddings,
            )

    def rows(self, asked: Mapping[str, AnyStatistic], further: tuple[Rows, ...] = ()) -> Rows:
        named = {name: self.results[statistic] for name, statistic in asked.items()}
        return Rows(self, named, further)

    @cached_property
    def x(self) -> Tensor:
        return normalize(self.sides[0]) if self.unit else self.sides[0]

    @cached_property
    def y(self) -> Tensor:
        if self.sides[1] is self.sides[0]:
            return self.x
        return normalize(self.sides[1]) if self.unit else self.sides[1]

    @cached_property
    def positives(self) -> Tensor:
        return paired(self.x, self.y, self.pairs.positives)


def _value(
    term: Objective, prepared: Pairs, matrices: list[_Matrix], asked: Mapping[str, AnyStatistic]
) -> tuple[Tensor, str]:
    """The value of a term, and why it is 0 without being learnt."""
    matrix = matrices[0]
    # What the global pairs hold decides: ranks must agree on whether they go on to the sums over all of them.
    idle = term.idle(prepared)
    if idle:
        return (matrix.sides[0] * 0.0).sum(), idle
    if prepared.has_positives is False and term.is_base():
        return (matrix.sides[0] * 0.0).sum(), "0: no anchor has a positive"
    rows = matrix.rows(asked, tuple(other.rows(asked) for other in matrices[1:]) if len(matrices) > 1 else ())
    value = term.loss(matrix.positives if term.similarity is not None else matrix.x, rows)
    if value.ndim:
        if term.needs_negatives and matrix.pairs.known.padded:
            # Some anchors may have no negative; where nothing is padded, all have one or none has.
            value = value.masked_fill(matrix.pairs.negative_counts == 0, 0.0)
        value = rows.mean(value)
    elif term.needs_negatives and prepared.has_negatives is None and not bool((prepared.negative_counts > 0).any()):
        # A finished scalar cannot be masked. Lists as long as the candidates are the one case that asks the device.
        return (matrix.sides[0] * 0.0).sum(), NO_NEGATIVES
    return value, "; ".join(rows.notes) if rows.notes else ""


def _left_out(term: Objective, prepared: Pairs) -> Tensor | None:
    """How many anchors of all ranks have no positive, where the term averages over those that have one."""
    mask = prepared.positive_mask
    return None if mask is None or not term.is_base() else len(mask) - mask.any(1).sum()


def _mean(values: list[TermValue]) -> TermValue:
    """One term's value over several Pairs; the note that all of them have."""
    notes = {each.note for each in values}
    value = torch.stack([each.value for each in values]).mean()
    left_out = [each.left_out for each in values if each.left_out is not None]
    return TermValue(
        value,
        values[0].weight,
        notes.pop() if len(notes) == 1 else "",
        torch.stack(left_out).sum() if left_out else None,
    )
