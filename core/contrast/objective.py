"""Objectives, their weighted sums, and the way from text to an `nn.Module`."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from dipole.core.contrast.gather import Input, Related, relate
from dipole.core.contrast.options import checked, options_of
from dipole.core.contrast.pairs import Pairs
from dipole.core.contrast.registry import Entry, registry
from dipole.core.contrast.rows import AnyStatistic, row_statistics
from dipole.core.contrast.similarity import full_precision, normalize, paired
from dipole.core.contrast.spec import Term, format_terms, option_span, parse
from dipole.core.contrast.spec import caret as caret_under
from dipole.core.ground.distributed import all_sum
from dipole.core.ground.errors import OptionError, PairsError, SpecError


class Rows:
    """Row statistics of one term by the names it gave them, and what else it may ask about its pairs."""

    def __init__(self, pairs: Pairs, x: Tensor, y: Tensor, values: dict[str, Tensor]) -> None:
        self.pairs = pairs
        self.x = x
        self.y = y
        self._values = values

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"no row statistic {name!r}; declared: {', '.join(self._values) or 'none'}") from None

    @property
    def count(self) -> Tensor:
        """(A,) number of negatives of each anchor, in the embeddings' dtype."""
        return self.pairs.negative_counts.to(self.x.dtype)

    def similarity(self, index: Tensor) -> Tensor:
        """Similarities (A, n) with the listed candidates, with gradient."""
        return paired(self.x, self.y, index)

    def over_positives(self, values: Tensor) -> Tensor:
        """Mean over the positives of each anchor: (A, K) -> (A,)."""
        mask = self.pairs.positive_mask
        if mask is None:
            return values.mean(1)
        return torch.where(mask, values, 0.0).sum(1) / mask.sum(1).clamp_min(1)

    def only_positives(self, values: Tensor, fill: float) -> Tensor:
        """The same (A, K) with padding replaced by a number."""
        mask = self.pairs.positive_mask
        return values if mask is None else torch.where(mask, values, fill)

    def mean(self, values: Tensor) -> Tensor:
        """Mean of (A,) over the anchors that have a positive, of all ranks."""
        mask = self.pairs.positive_mask
        if mask is None:
            return self.mean_over_all(values)
        has = mask.any(1)
        return all_sum(torch.where(has, values, 0.0).sum()) / all_sum(has.sum().to(values.dtype)).clamp_min(1)

    def mean_over_all(self, values: Tensor) -> Tensor:
        """Mean of (A,) over all anchors, of all ranks."""
        return all_sum(values.sum()) / all_sum(values.new_tensor(float(len(values))))


def _checking(init: Callable[..., None]) -> Callable[..., None]:
    """Check the options of a constructor against its signature and remember what was given."""

    @functools.wraps(init)
    def wrapped(self: "Objective", *args: Any, **kwargs: Any) -> None:
        owner = type(self).registered_name()
        signature = inspect.signature(init)
        options = options_of(init)
        unknown = {key: value for key, value in kwargs.items() if key not in signature.parameters}
        checked(owner, options, unknown)  # raises for an unknown name
        try:
            given = dict(signature.bind_partial(self, *args, **kwargs).arguments)
        except TypeError as error:
            raise OptionError(f"{owner}: {error}. Its options: {', '.join(o.name for o in options)}.") from None
        given.pop("self")
        given = checked(owner, options, given)
        for option in options:
            if option.default is inspect.Parameter.empty and option.name not in given:
                raise OptionError(f"{owner} needs the option {option.name!r}: {option.allowed}.")
        if "given" not in self.__dict__:
            object.__setattr__(self, "given", given)
        init(self, **given)

    return wrapped


class Objective(nn.Module):
    """One term of a loss: a small function of positives and row statistics.

    A subclass sets `similarity`, declares what it needs of each row in `statistics`, and combines the results in
    `loss`, which returns one value per anchor, (A,), or the finished scalar. Options are the constructor's arguments:
    their types, ranges (`Annotated[float, Range(above=0)]`) and help texts are read off the signature.
    """

    needs_negatives: ClassVar[bool] = True
    given: dict[str, Any]
    similarity: str | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            cls.__init__ = _checking(cls.__init__)  # type: ignore[method-assign]

    def __init__(self, similarity: str | None = None) -> None:
        super().__init__()
        self.similarity = similarity
        if similarity == "bilinear":
            self.W = UninitializedParameter()

    @classmethod
    def registered_name(cls) -> str:
        """The name it was registered under, or the class name."""
        return registry.name_of(cls) or cls.__name__

    # What a subclass defines.

    def prepare(self, pairs: Pairs) -> Pairs:
        """The pairs this term looks at; most look at what they are given.

        Under several ranks they are those of the global batch, and this rank's anchors are taken afterwards: a term
        keeps the anchors it is given, in their order, and pads the positives of those it leaves out with -1.
        """
        return pairs

    def statistics(self) -> dict[str, AnyStatistic]:
        """Row statistics over the negatives, by the name `loss` uses."""
        return {}

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        """Combine similarities of positives (A, K) and statistics of rows into (A,) or a scalar."""
        raise NotImplementedError

    def build(self, dim: int) -> None:
        """Create parameters for embeddings of width `dim`, once."""
        if self.similarity == "bilinear":
            self.materialize("W", (dim, dim), nn.init.eye_)

    @property
    def positives_wanted(self) -> int | None:
        """How many positives of each anchor the term asks for; None if it takes what is there."""
        return None

    def weights(self) -> tuple[float, float]:
        """What weight it gives a point: (t_pos, t_neg) of e^{t_pos d2} for a positive and e^{-t_neg d2} for a negative.

        d2 is the squared distance of unit vectors (CACR Eqs. 3, 5); (0, 0), the default, weighs all alike.
        """
        return 0.0, 0.0

    def after_step(self, learning_rate: float, weight: float) -> None:
        """Called after each optimizer step (proximal steps)."""

    def transform(self, features: Tensor) -> Tensor:
        """Features for downstream use."""
        return features

    # What it inherits.

    def materialize(self, name: str, shape: tuple[int, ...], init: Callable[[Tensor], Any]) -> None:
        """Give a lazily created parameter its shape; later calls must agree with it."""
        parameter = getattr(self, name)
        if isinstance(parameter, UninitializedParameter):
            parameter.materialize(shape)
            with torch.no_grad():
                init(parameter)
        elif tuple(parameter.shape) != shape:
            raise PairsError(
                f"{self.registered_name()} was built for embeddings of width {parameter.shape[-1]}, got {shape[-1]}; "
                "build another objective with dim= of the new width."
            )

    def project(self, pairs: Pairs) -> tuple[Tensor, Tensor, float | None]:
        """x, y and the bound of |x . y| with s_ij = x_i . y_j."""
        symmetric = pairs.anchors is pairs.candidates
        a = full_precision(pairs.anchors)
        c = a if symmetric else full_precision(pairs.candidates)
        if self.similarity == "cosine":
            x = normalize(a)
            return x, x if symmetric else normalize(c), 1.0
        if self.similarity == "bilinear":
            return a @ self.W.to(a.dtype), c, None
        return a, c, None

    def build_for(self, embeddings: Tensor) -> None:
        """Create parameters that do not exist yet, as wide as the embeddings (A, d) and where they are."""
        lazy = any(isinstance(each, UninitializedParameter) for each in self.parameters())
        self.build(embeddings.shape[1])
        if lazy:
            self.to(embeddings.device)

    def projection(self) -> object:
        """What tells one matrix of similarities from another: terms of equal projections share a sweep.

        Cosine and dot products are the same for all terms; a bilinear W, and whatever a term projects by itself, is its
        own.
        """
        shared = type(self).project is Objective.project and self.similarity != "bilinear"
        return self.similarity if shared else id(self)

    def forward(self, pairs: Input | Related | Tensor, *views: Tensor) -> Tensor:
        """The scalar loss of this term alone, unweighted."""
        outcome: Outcome = Composite([self], [1.0])(pairs, *views)
        return outcome.loss

    def extra_repr(self) -> str:
        return str(self.term())

    def term(self, weight: float | None = None) -> Term:
        """This objective as a term of the grammar."""
        return Term(self.registered_name(), tuple(self.given.items()) if "given" in self.__dict__ else (), weight)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # A parameter without a shape yet has nothing to save.
        lazy = {name: p for name, p in self._parameters.items() if isinstance(p, UninitializedParameter)}
        for name in lazy:
            self._parameters[name] = None
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self._parameters.update(lazy)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name, parameter in self._parameters.items():
            if isinstance(parameter, UninitializedParameter) and prefix + name in state_dict:
                parameter.materialize(state_dict[prefix + name].shape)
        super()._load_from_state_dict(state_dict, prefix, *args)


@dataclass(frozen=True)
class TermValue:
    """What one term contributed; `note` says why a value is 0 without being learnt."""

    value: Tensor
    weight: float
    note: str = ""

    def __float__(self) -> float:
        return float(self.value)


@dataclass(frozen=True)
class Outcome:
    """The loss to descend and the unweighted value of each term by name."""

    loss: Tensor
    terms: dict[str, TermValue]


class Composite(nn.Module):
    """A weighted sum of terms, computed in one sweep for all terms of the same similarity.

    Args:
        terms: objectives and regularizers.
        weights: one for each term; by default the entry's own (1, or the paper's lambda for a regularizer).
    """

    def __init__(self, terms: Sequence[Objective], weights: Sequence[float] | None = None) -> None:
        super().__init__()
        self.terms = nn.ModuleList(terms)
        self.weights = list(weights) if weights is not None else [entry_of(term).weight for term in terms]
        names = [term.registered_name() for term in terms]
        self.names = [
            name if names.count(name) == 1 else f"{name}.{names[:place].count(name)}"
            for place, name in enumerate(names)
        ]

    def __iter__(self) -> Iterator[tuple[str, float, Objective]]:
        for name, weight, term in zip(self.names, self.weights, self.terms, strict=True):
            assert isinstance(term, Objective)
            yield name, weight, term

    def __str__(self) -> str:
        return format_terms([term.term(None if weight == 1 and _is_base(term) else weight) for _, weight, term in self])

    def build(self, dim: int) -> "Composite":
        """Create all parameters for embeddings of width `dim`; needed before an optimizer if there is any."""
        for _, _, term in self:
            term.build(dim)
        return self

    def forward(self, pairs: Input | Related | Tensor, *views: Tensor) -> Outcome:
        """Evaluate on what an encoder made of a batch.

        Args:
            pairs: `Embedded` rows; `Pairs`, or a tuple of them whose losses are averaged; or, with `views`, two or more
                views (B, d) each: `objective(z1, z2)`. Under several ranks each rank gives its own rows.

        Raises:
            PairsError: if the pairs cannot carry a term (labels missing, too few positives).
        """
        if isinstance(pairs, Tensor):
            pairs = Pairs.from_views([pairs, *views])
        elif views:
            raise PairsError("give either Pairs or views, not both.")
        related = relate(pairs)
        found = [self._values(each, related) for each in related.pairs]
        values = {name: _mean([each[name] for each in found]) for name in self.names}
        loss = torch.stack([v.weight * v.value for v in values.values()]).sum()
        return Outcome(loss, {name: TermValue(v.value.detach(), v.weight, v.note) for name, v in values.items()})

    def _values(self, pairs: Pairs, related: Related) -> dict[str, TermValue]:
        """The value of each term on pairs of the global batch, the mean over all ranks' anchors."""
        prepared = [term.prepare(pairs) for _, _, term in self]
        # Terms that look at the same pairs look at the same narrowed pairs.
        local = {id(each): related.local(each) for each in prepared}
        seen: dict[Any, _Matrix] = {}
        matrices = []
        for (_, _, term), each in zip(self, prepared, strict=True):
            term.build_for(each.anchors)
            key = id(each), term.projection()
            if key not in seen:
                seen[key] = _Matrix.of(term, local[id(each)])
            seen[key].wanted += term.statistics().values()
            matrices.append(seen[key])
        for matrix in seen.values():
            matrix.sweep()
        return {
            name: TermValue(*_evaluate(term, each, matrix, weight))
            for (name, weight, term), each, matrix in zip(self, prepared, matrices, strict=True)
        }

    @property
    def positives_wanted(self) -> int | None:
        """The largest number of positives that a term asks for; None if each takes what is there."""
        return max((term.positives_wanted for _, _, term in self if term.positives_wanted is not None), default=None)

    def sharpness(self) -> tuple[float, float]:
        """(t_pos, t_neg) of the first term that weighs points unequally (`Objective.weights`); else CACR's defaults."""
        return next((term.weights() for _, _, term in self if any(term.weights())), (1.0, 2.0))

    def after_step(self, learning_rate: float) -> None:
        """Proximal steps of the terms that have one; call it after each optimizer step."""
        for _, weight, term in self:
            term.after_step(learning_rate, weight)

    def transform(self, features: Tensor) -> Tensor:
        """Features for downstream use: L Phi(x) where a term learns a projection, else unchanged."""
        for _, _, term in self:
            features = term.transform(features)
        return features


class _Matrix:
    """One similarity matrix and the statistics that all terms looking at it have asked for."""

    def __init__(self, pairs: Pairs, x: Tensor, y: Tensor, bound: float | None) -> None:
        self.pairs, self.x, self.y, self.bound = pairs, x, y, bound
        self.wanted: list[AnyStatistic] = []
        self.results: dict[AnyStatistic, Tensor] = {}

    @classmethod
    def of(cls, term: Objective, pairs: Pairs) -> "_Matrix":
        if term.similarity is None:
            x = full_precision(pairs.anchors)
            return cls(pairs, x, x, None)
        return cls(pairs, *term.project(pairs))

    def sweep(self) -> None:
        # Without a candidate that could be a negative there is nothing to sweep.
        if self.wanted and len(self.y) > self.pairs.first_negative:
            self.results = row_statistics(
                self.x,
                self.y,
                self.pairs.excluded,
                self.wanted,
                counts=self.pairs.negative_counts,
                bound=self.bound,
                symmetric=self.pairs.mutual and self.x is self.y,
                first=self.pairs.first_negative,
            )

    def rows(self, term: Objective) -> Rows:
        named = {name: self.results[statistic] for name, statistic in term.statistics().items() if self.results}
        return Rows(self.pairs, self.x, self.y, named)

    @functools.cached_property
    def positives(self) -> Tensor:
        return paired(self.x, self.y, self.pairs.positives)


def _evaluate(term: Objective, prepared: Pairs, matrix: _Matrix, weight: float) -> tuple[Tensor, float, str]:
    # What the global pairs hold decides: ranks must agree on whether they go on to the sums over all of them.
    if term.needs_negatives and not prepared.has_negatives:
        return (matrix.x * 0.0).sum(), weight, "0: no anchor has a negative (every candidate is a positive or dropped)"
    if prepared.positives.shape[1] == 0 and _is_base(term):
        return (matrix.x * 0.0).sum(), weight, "0: no anchor has a positive"
    rows = matrix.rows(term)
    value = term.loss(matrix.positives if term.similarity is not None else matrix.x, rows)
    if value.ndim:
        if term.needs_negatives:
            value = torch.where(matrix.pairs.negative_counts > 0, value, 0.0)
        value = rows.mean(value)
    return value, weight, ""


def _mean(values: list[TermValue]) -> TermValue:
    """One term's value over several Pairs; the note that all of them have."""
    if len(values) == 1:
        return values[0]
    notes = {each.note for each in values}
    value = torch.stack([each.value for each in values]).mean()
    return TermValue(value, values[0].weight, notes.pop() if len(notes) == 1 else "")


def entry_of(term: Objective) -> Entry:
    """The registry entry of a term's class.

    Raises:
        SpecError: if the class is not registered.
    """
    return registry.get(term.registered_name())


def _is_base(term: Objective) -> bool:
    return registry.name_of(type(term)) is None or entry_of(term).kind == "objective"


def objective(text: str, dim: int | None = None) -> Composite:
    """Build an objective from text such as `infonce(temperature=0.5) + 0.1*dp(delta_pos=0.1, delta_neg=0.5)`.

    Args:
        text: weighted sum of registered names with options; see `dipole list` and `dipole show NAME`.
        dim: width of the embeddings. Needed before an optimizer is built if a term has parameters (bilinear
            similarity, prototypes, CLLR's L); otherwise they are created at the first call.

    Returns:
        A module: `objective(pairs)` or `objective(z1, z2)` gives an `Outcome` with `.loss` and `.terms`.

    Raises:
        SpecError: for anything wrong in the text, with a caret under it, what is allowed and the nearest name.
    """
    terms, weights = [], []
    for term in parse(text):
        name_end = term.end if not term.options else text.index("(", term.start)
        name_start = text.index(term.name, term.start)
        try:
            entry = registry.get(term.name)
        except SpecError as error:
            raise SpecError(f"{error}\n{caret_under(text, name_start, name_end)}") from None
        if entry.kind == "diagnostic":
            raise SpecError(
                f"{entry.name!r} is a diagnostic: it measures and has no gradient. Objectives and regularizers: "
                f"{', '.join(e.name for e in registry.entries() if e.kind != 'diagnostic')}.\n"
                f"{caret_under(text, name_start, name_end)}"
            )
        try:
            built = entry.target(**dict(term.options))
        except OptionError as error:
            given = error.option in dict(term.options)
            span = option_span(text, term, error.option) if given else (name_start, term.end)
            raise SpecError(f"{error}\n{caret_under(text, *span)}") from None
        if term.weight is not None and term.weight < 0:
            raise SpecError(
                f"the weight of {entry.name} must be >= 0, got {term.weight:g}.\n"
                f"{caret_under(text, term.start, name_start)}"
            )
        terms.append(built)
        weights.append(entry.weight if term.weight is None else term.weight)
    composite = Composite(terms, weights)
    return composite.build(dim) if dim is not None else composite
