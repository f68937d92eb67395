"""Objectives, their weighted sums, and the way from text to an `nn.Module`."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from dipole.core.objectives.evaluate import NO_NEGATIVES, Outcome, Rows, TermValue, evaluate, has_repulsion
from dipole.core.objectives.gather import GlobalPairs, Input, all_gather_pairs
from dipole.core.objectives.options import check_whole, checked, options_of
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.registry import Entry, registry
from dipole.core.objectives.similarity import Similarity, full_precision, normalize
from dipole.core.objectives.spec import Term, format_terms, numbered, option_span, parse
from dipole.core.objectives.spec import caret as caret_under
from dipole.core.objectives.statistics import AnyStatistic
from dipole.core.utils.distributed import world_size
from dipole.core.utils.errors import OptionError, PairsError, SpecError
from dipole.core.utils.memory import check_fits

__all__ = ["SHARPNESS", "Composite", "Objective", "Outcome", "Rows", "TermValue", "entry_of", "objective"]

SHARPNESS = 1.0, 2.0
"""t_pos and t_neg by which pictures and entropies weigh points where no term says how: CACR's defaults."""
SIMILARITIES = (*get_args(Similarity), None)


def _checking(init: Callable[..., None]) -> Callable[..., None]:
    """Check the options of a constructor against its signature and remember what was given."""

    @functools.wraps(init)
    def wrapped(self: "Objective", /, *args: Any, **kwargs: Any) -> None:
        owner = type(self).registered_name()
        signature = inspect.signature(init)
        options = options_of(init)
        unknown = {key: value for key, value in kwargs.items() if key == "self" or key not in signature.parameters}
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

    Args:
        similarity: s_ij of anchor and candidate: "cosine"; "dot", of the embeddings as they are; "bilinear", a_i^T W
            c_j with a learned W, (d, d), which starts as the identity; None: there is none, and `loss` gets the
            anchors.

    Raises:
        OptionError: an option is unknown, missing, of the wrong type or out of its range, or there is no such
            similarity.
    """

    needs_negatives: ClassVar[bool] = True
    """Without negatives its value is 0, with a note. Set False if it has a value for positives alone."""
    positives_are_pairs: ClassVar[bool] = False
    """It counts positives that are other instances (`Pairs.views` is False) as pairs, as it counts negatives."""
    stateful: ClassVar[bool] = False
    """Its value depends on earlier calls. The conformance kit then sets it back before each call, and wants the state
    in `state_dict`."""
    detached: ClassVar[bool | tuple[str, ...]] = False
    """It stops a gradient on purpose: True for one somewhere inside, or the rows that get none of it, ("candidates",).
    The rows named are detached for its `reference` too."""
    given: dict[str, Any]
    """The options that it was built with, by name."""
    similarity: str | None
    """What s_ij is: "cosine", "dot" or "bilinear", or None where there is no similarity matrix."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            cls.__init__ = _checking(cls.__init__)  # type: ignore[method-assign]

    def __init__(self, similarity: str | None = None) -> None:
        super().__init__()
        if similarity not in SIMILARITIES:
            allowed = ", ".join(map(repr, SIMILARITIES))
            raise OptionError(
                f"{self.registered_name()}: similarity must be one of {allowed}, got {similarity!r}.", "similarity"
            )
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

        Args:
            pairs: anchors (A, d) and candidates (C, d) of all ranks.

        Returns:
            `Pairs` of the same A anchors.

        Raises:
            PairsError: from a term that cannot work on them (labels missing, too few positives).
        """
        return pairs

    def extra_pairs(self, pairs: Pairs) -> tuple[Pairs, ...]:
        """More pairs whose rows it looks at, as `rows.extra_pairs`: the same statistics of other anchors.

        Like `prepare` it is given those of the global batch; most terms have none.

        Args:
            pairs: as in `prepare`.

        Returns:
            Pairs, one or more; () for none.
        """
        return ()

    def statistics(self) -> dict[str, AnyStatistic]:
        """Row statistics over the negatives, by the name `loss` uses."""
        return {}

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        """Combine similarities of positives and statistics of rows into one value per anchor, (A,), or a scalar, ().

        Anchors are this rank's, candidates all ranks'. A scalar must be the same on every rank, made of `rows.mean` and
        of `rows.pairs.candidates`, never of the anchors alone.

        Args:
            positive: similarities with the positives, (A, K), where padding holds that with candidate 0
                (`rows.over_positives` and `rows.only_positives` leave it out); where `similarity` is None the anchors,
                (A, d).
            rows: what `statistics` asked for, (A,) each, by name, and the pairs.

        Returns:
            (A,), of which the mean over the anchors of all ranks that have a positive is taken, or ().
        """
        raise NotImplementedError

    def build(self, dim: int) -> None:
        """Create parameters for embeddings of width `dim`, once; later calls must be of the same width.

        Args:
            dim: width of the embeddings, >= 1.

        Raises:
            PairsError: they are there already, of another width.
            OptionError: they would not fit into memory.
        """
        if self.similarity == "bilinear":
            self.materialize("W", (dim, dim), nn.init.eye_)

    @property
    def positives_wanted(self) -> int | None:
        """How many positives of each anchor the term asks for, >= 1; None if it takes what is there."""
        return None

    def weights(self) -> tuple[float, float]:
        """Weights of a point: (t_pos, t_neg) >= 0 of e^{t_pos d2} for a positive, e^{-t_neg d2} for a negative.

        d2 is the squared distance of unit vectors (CACR Eqs. 3, 5); (0, 0), the default, weighs all alike.
        """
        return 0.0, 0.0

    def idle(self, pairs: Pairs) -> str:
        """Why the pairs of all ranks that it has prepared leave it nothing to learn; empty if they do not.

        Args:
            pairs: those of all ranks that `prepare` gave.

        Returns:
            The note of a value 0, or "".
        """
        if self.needs_negatives and has_repulsion(self, pairs) is False:
            return NO_NEGATIVES
        return ""

    def after_step(
        self, learning_rate: float, weight: float, step: int | None = None, total: int | None = None
    ) -> None:
        """Called after each optimizer step (proximal steps, what changes with time).

        A method without `step` and `total` is called without them.

        Args:
            learning_rate: of this step, >= 0.
            weight: of the term in its sum, >= 0.
            step: how many steps are done, this one included, >= 1; None where the caller does not say.
            total: of the whole run; None where nobody knows.
        """

    def transform(self, features: Tensor) -> Tensor:
        """Features for downstream use, unchanged unless the term learns a projection.

        Args:
            features: (n, d), as wide as the embeddings.

        Returns:
            (n, d).
        """
        return features

    def summary(self) -> dict[str, float]:
        """Numbers of the term itself to log at each evaluation, by name."""
        return {}

    def measure(self, embeddings: Tensor) -> dict[str, float]:
        """Numbers of the term on test embeddings to log at each evaluation, by name.

        Args:
            embeddings: (n, d), those that the diagnostics look at.
        """
        return {}

    def remarks(self) -> list[str]:
        """Sentences for the record on the state in which the term has ended, where that is one to know of."""
        return []

    # What it inherits.

    def materialize(self, name: str, shape: tuple[int, ...], init: Callable[[Tensor], Any]) -> None:
        """Give a lazily created parameter its shape; later calls must agree with it.

        Args:
            name: of the attribute that holds an `UninitializedParameter`.
            shape: what it gets, the width of the embeddings last.
            init: fills the tensor in place, as the functions of `torch.nn.init` do.

        Raises:
            PairsError: it has another shape already.
            OptionError: it would not fit into memory.
        """
        parameter = getattr(self, name)
        if isinstance(parameter, UninitializedParameter):
            check_fits(f"{self.registered_name()}: {name}", shape, parameter)
            parameter.materialize(shape)
            with torch.no_grad():
                init(parameter)
        elif tuple(parameter.shape) != shape:
            raise PairsError(
                f"{self.registered_name()} was built for embeddings of width {parameter.shape[-1]}, got {shape[-1]}; "
                "build another objective with dim= of the new width."
            )

    def project(self, pairs: Pairs) -> tuple[Tensor, Tensor, float | None]:
        """What the similarities are products of: s_ij = x_i . y_j.

        Args:
            pairs: anchors (A, d) and candidates (C, d).

        Returns:
            x (A, h) and y (C, h), one tensor where anchors and candidates are one, and a bound of |x_i . y_j|, None
            where there is none.
        """
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
        """Create parameters that do not exist yet, as wide as the embeddings and on their device.

        Args:
            embeddings: (A, d).

        Raises:
            PairsError: the parameters are of another width.
        """
        held = self._parameters or self._modules  # most have none, and to go through them takes as long as a product
        lazy = bool(held) and any(isinstance(each, UninitializedParameter) for each in self.parameters())
        self.build(embeddings.shape[1])
        if lazy:
            self.to(embeddings.device)

    def projection(self) -> object:
        """What tells one matrix of similarities from another: terms of equal projections share a sweep.

        Cosine and dot products are the same for all terms; a bilinear W, and whatever a term projects by itself, is its
        own.
        """
        return self.similarity if self.keeps_directions else id(self)

    @property
    def by_row(self) -> bool:
        """Whether it projects each row by itself, wherever the row lies."""
        return type(self).project is Objective.project

    @property
    def keeps_directions(self) -> bool:
        """Whether x and y are the embeddings themselves, up to a factor for each row."""
        return self.by_row and self.similarity != "bilinear"

    def forward(self, pairs: Input | GlobalPairs | Tensor, *views: Tensor) -> Tensor:
        """The loss of this term alone, unweighted, (), with gradient.

        Args:
            pairs: as in `Composite.forward`.
            views: likewise.

        Raises:
            PairsError: as there.
        """
        outcome: Outcome = Composite([self], [1.0])(pairs, *views)
        return outcome.loss

    def extra_repr(self) -> str:
        return str(self.term())

    def is_base(self) -> bool:
        """Whether it is a base objective, which needs positives, and no regularizer."""
        return registry.name_of(type(self)) is None or entry_of(self).kind == "objective"

    def term(self, weight: float | None = None) -> Term:
        """This objective as a term of the grammar, with the options that it was given.

        Args:
            weight: what is written before it, >= 0; None: nothing is.
        """
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


class Composite(nn.Module):
    """A weighted sum of terms, computed in one sweep for all terms of the same similarity.

    A call, `objective(z1, z2)` or `objective(pairs)`, gives an `Outcome`; see `forward`.

    Args:
        terms: objectives and regularizers, one at least.
        weights: one number for each term; by default the entry's own (1, or the paper's lambda for a regularizer).

    Raises:
        OptionError: there is no term, or another number of weights.
        SpecError: no weights are given, and the class of a term is not registered.
    """

    def __init__(self, terms: Sequence[Objective], weights: Sequence[float] | None = None) -> None:
        super().__init__()
        if not terms:
            raise OptionError("Composite needs one term at least: Composite([InfoNCE()]), say.")
        if weights is not None and len(weights) != len(terms):
            raise OptionError(f"Composite needs a weight for each of {len(terms)} terms, got {len(weights)}.")
        self.terms = nn.ModuleList(terms)
        self.weights = list(weights) if weights is not None else [entry_of(term).weight for term in terms]
        self.names = numbered([term.registered_name() for term in terms])

    def __iter__(self) -> Iterator[tuple[str, float, Objective]]:
        for name, weight, term in zip(self.names, self.weights, self.terms, strict=True):
            assert isinstance(term, Objective)
            yield name, weight, term

    def __str__(self) -> str:
        return format_terms([term.term(None if weight == 1 and term.is_base() else weight) for _, weight, term in self])

    def build(self, dim: int) -> "Composite":
        """Create all parameters for embeddings of width `dim`; needed before an optimizer if there is any.

        Args:
            dim: width of the embeddings, >= 1.

        Returns:
            The objective itself.

        Raises:
            PairsError: a term has parameters of another width already.
            OptionError: `dim` is no whole number >= 1, or the parameters would not fit into memory.
        """
        check_whole("dim", dim)
        for _, _, term in self:
            term.build(dim)
        return self

    def forward(self, pairs: Input | GlobalPairs | Tensor, *views: Tensor) -> Outcome:
        """Evaluate on what an encoder made of a batch.

        Args:
            pairs: an `EncodedBatch`; `Pairs`, or a tuple of them whose losses are averaged; or the first of two or
                more views, (B, d). Under several ranks each rank gives its own rows.
            views: the other views, (B, d) each, where `pairs` is one: `objective(z1, z2)`.

        Returns:
            An `Outcome`: `loss`, (), with gradient, and `terms`, what each has contributed, by name.

        Raises:
            PairsError: rows that do not fit together, a single view, views beside Pairs, or pairs that cannot carry a
                term (labels missing, too few positives, another width than a term was built for).
        """
        if isinstance(pairs, Tensor):
            pairs = Pairs.from_views((pairs, *views))
        elif views:
            raise PairsError("give either Pairs or views, not both.")
        if isinstance(pairs, Pairs) and world_size() == 1:
            everything = GlobalPairs((pairs,))
        else:
            everything = all_gather_pairs(pairs)
        return evaluate({name: (weight, term) for name, weight, term in self}, everything)

    @property
    def positives_wanted(self) -> int | None:
        """The largest number of positives that a term asks for; None if each takes what is there."""
        return max((term.positives_wanted for _, _, term in self if term.positives_wanted is not None), default=None)

    def sharpness(self) -> tuple[float, float]:
        """(t_pos, t_neg) >= 0 of the first term that weighs points unequally (`Objective.weights`); else (1, 2)."""
        return next((term.weights() for _, _, term in self if any(term.weights())), SHARPNESS)

    def after_step(self, learning_rate: float, step: int | None = None, total: int | None = None) -> None:
        """Proximal steps of the terms that have one; call it after each optimizer step.

        Args:
            learning_rate: of this step, >= 0.
            step: how many steps are done, this one included, >= 1; None where the caller does not say.
            total: of the whole run; None where nobody knows.
        """
        for _, weight, term in self:
            when = {"step": step, "total": total}
            term.after_step(learning_rate, weight, **{key: when[key] for key in _timed(type(term).after_step)})

    def transform(self, features: Tensor) -> Tensor:
        """Features for downstream use: L Phi(x) where a term learns a projection, else unchanged.

        Args:
            features: Phi(x), (n, d), as wide as the embeddings that the terms were built for.

        Returns:
            (n, d).
        """
        for _, _, term in self:
            features = term.transform(features)
        return features


@functools.cache
def _timed(after_step: Callable[..., None]) -> tuple[str, ...]:
    """What an `after_step` wants to know of the time."""
    parameters = inspect.signature(after_step).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return tuple(name for name in ("step", "total") if takes_all or name in parameters)


def entry_of(term: Objective) -> Entry:
    """The registry entry of a term's class.

    Raises:
        SpecError: if the class is not registered.
    """
    return registry.get(term.registered_name())


def objective(text: str, dim: int | None = None) -> Composite:
    """Build an objective from text such as `infonce(temperature=0.5) + 0.1*dp(delta_pos=0.1, delta_neg=0.5)`.

    Args:
        text: weighted sum of registered names with options; see `dipole list` and `dipole show NAME`.
        dim: width of the embeddings, >= 1. Needed before an optimizer is built if a term has parameters (bilinear
            similarity, prototypes, CLLR's L); otherwise they are created at the first call.

    Returns:
        A module (`Composite`): `objective(pairs)` or `objective(z1, z2)` gives an `Outcome` with `.loss`, (), and
        `.terms`.

    Raises:
        SpecError: for anything wrong in the text, with a caret under it, what is allowed and the nearest name.
        PairsError: a term has an option `dim` of another width than `dim`.
        OptionError: `dim` is no whole number >= 1, or parameters of that width would not fit into memory.
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
