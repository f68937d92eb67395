"""Objectives, their weighted sums, and the function that builds them from text."""

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from dipole.core.objectives import spec, term_values
from dipole.core.objectives.gather import Input, all_gather_pairs
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.registry import entry_of, registry, timed
from dipole.core.objectives.similarity import Similarity, full_precision, normalize
from dipole.core.objectives.statistics import AnyStatistic
from dipole.core.objectives.term_values import Outcome, Rows, TermValue
from dipole.core.utils.distributed import world_size
from dipole.core.utils.errors import OptionError, PairsError, SpecError
from dipole.core.utils.memory import check_fits
from dipole.core.utils.text import counted
from dipole.core.utils.uncompiled import uncompiled

__all__ = ["SHARPNESS", "Composite", "Objective", "Outcome", "Rows", "TermValue", "entry_of", "objective"]

SHARPNESS = 1.0, 2.0
"""Default t_pos and t_neg for the weights of points in plots and entropies, from CACR."""


class Objective(nn.Module):
    """One term of a loss: a small function of positives and row statistics.

        >>> class Attraction(dipole.Objective):
        ...     def loss(self, positive, rows):  # positive (A, K)
        ...         return rows.over_positives(1 - positive)
        >>> float(dipole.Composite([Attraction("cosine")], [1.0])(torch.eye(4), torch.eye(4)).loss)
        0.0

    A subclass sets `similarity`, declares its row statistics in `statistics`, and combines the results in `loss`, which
    returns one value per anchor, (A,), or a scalar. The constructor's arguments are the options. Their types, ranges
    (`Annotated[float, Range(above=0)]`) and help texts come from the signature.

    Args:
        similarity: s_ij of anchor and candidate. "cosine"; "dot" without normalization; "bilinear", a_i^T W c_j with a
            learned W, (d, d), which starts as the identity. With None there is no similarity matrix, and `loss` gets
            the anchors.

    Raises:
        OptionError: an option is unknown, missing, of the wrong type or out of range, or the similarity is unknown.
    """

    needs_negatives: ClassVar[bool] = True
    """Return 0 with a note if there are no negatives. Set False if positives alone give a value."""
    positives_are_pairs: ClassVar[bool] = False
    """Count positives that are other instances (`Pairs.views` is False) as pairs, like negatives."""
    stateful: ClassVar[bool] = False
    """The value depends on earlier calls. `state_dict` must contain the state, which the conformance kit resets."""
    flat: ClassVar[bool] = False
    """The term ignores a range of cosines, as a margin does, or all but the hardest negatives, on purpose."""
    detached: ClassVar[bool | tuple[str, ...]] = False
    """The term stops a gradient on purpose. Set True for an internal stop, or name the rows that get no gradient, such
    as ("candidates",). The `reference` gets these rows detached as well."""
    needs_learning_rate: bool | None = None
    """`after_step` uses the learning rate. None: if the class has its own `after_step`."""
    on_features: bool = False
    """The term acts on the encoder's features, `rows.features`, before a head."""
    weighting: Literal["rows", "pairs", "own"] | None = None
    """How the term uses `Pairs.weights`. None: the core averages values (A,) with weights (A,), and refuses weights if
    `loss` returns a scalar. "rows": the scalar of `loss` comes from means of `rows`, which apply weights (A,). "pairs":
    `loss` is a mean over positives by `rows.over_positives`, so weights (A, K) work as well. "own": `loss` reads
    `rows.pairs.weights`, for example as soft targets, and nothing else applies them."""
    given: dict[str, Any]
    """The options given to the constructor, by name."""
    similarity: str | None
    """The similarity s_ij: "cosine", "dot", "bilinear", or None without a similarity matrix."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            cls.__init__ = spec.remember_options(cls.__init__)  # type: ignore[method-assign]

    @spec.remember_options
    def __init__(self, similarity: Annotated[Similarity | None, "none: without a similarity matrix"] = None) -> None:
        super().__init__()
        self.similarity = similarity
        if similarity == "bilinear":
            self.W = nn.UninitializedParameter()

    @classmethod
    def registered_name(cls) -> str:
        """Return the registered name, or the class name."""
        return registry.name_of(cls) or cls.__name__

    def prepare(self, pairs: Pairs) -> Pairs:
        """Return the pairs that this term uses. The default returns its input.

        With several ranks the input is the global batch, and this rank's anchors are selected afterwards. So keep all
        anchors in their order. To leave an anchor out, pad its positives with -1.

        Args:
            pairs: anchors (A, d) and candidates (C, d) of all ranks.

        Returns:
            `Pairs` with the same A anchors.

        Raises:
            PairsError: the term cannot use the pairs (labels missing, too few positives).
        """
        return pairs

    def extra_pairs(self, pairs: Pairs) -> tuple[Pairs, ...]:
        """Return more pairs. `loss` gets their statistics as `rows.extra_pairs`.

        Like `prepare`, it gets the pairs of the global batch. Most terms return ().

        Args:
            pairs: as in `prepare`.

        Returns:
            One or more Pairs, or ().
        """
        return ()

    def statistics(self) -> dict[str, AnyStatistic]:
        """Return the row statistics over the negatives, by the name that `loss` uses."""
        return {}

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        """Combine similarities of positives and statistics of rows into one value per anchor, (A,), or a scalar, ().

        Anchors belong to this rank, candidates to all ranks. A scalar must be the same on every rank. Compute it from
        `rows.mean` and `rows.pairs.candidates`, never from the anchors alone.

        Args:
            positive: similarities with the positives, (A, K). Padding holds the similarity with candidate 0, which
                `rows.over_positives` and `rows.only_positives` leave out. If `similarity` is None, the anchors (A, d).
            rows: the pairs and the statistics from `statistics`, (A,) each, by name.

        Returns:
            (A,) or (). Values (A,) are averaged over the anchors of all ranks that have a positive.
        """
        raise NotImplementedError

    def build(self, dim: int) -> None:
        """Create parameters for embeddings of width `dim`. Later calls must use the same width.

        Args:
            dim: width of the embeddings, >= 1.

        Raises:
            PairsError: the parameters already exist with another width.
            OptionError: the parameters would not fit into memory.
        """
        if self.similarity == "bilinear":
            self.materialize("W", (dim, dim), nn.init.eye_)

    @property
    def positives_wanted(self) -> int | None:
        """Number of positives per anchor that the term needs, >= 1. None if any number will do."""
        return None

    def weights(self) -> tuple[float, float]:
        """Return (t_pos, t_neg) >= 0, for weights e^{t_pos d2} of positives and e^{-t_neg d2} of negatives.

        d2 is the squared distance of unit vectors (CACR Eqs. 3, 5). The default (0, 0) weighs all points equally.
        """
        return 0.0, 0.0

    def idle(self, pairs: Pairs) -> str:
        """Return why the term can learn nothing from these pairs, or an empty string.

        Args:
            pairs: the pairs of all ranks from `prepare`.

        Returns:
            The note for a value of 0, or "".
        """
        if self.needs_negatives and term_values.has_repulsion(self, pairs) is False:
            return term_values.NO_NEGATIVES
        return ""

    def after_step(
        self, learning_rate: float, weight: float, step: int | None = None, total: int | None = None
    ) -> None:
        """Update the term after each optimizer step (proximal steps, schedules). You may omit `step` and `total`.

        Args:
            learning_rate: learning rate of this step, >= 0.
            weight: weight of the term in its sum, >= 0.
            step: number of finished steps, including this one, >= 1. None if unknown.
            total: number of steps of the whole run. None if unknown.
        """

    def transform(self, features: Tensor) -> Tensor:
        """Return features for downstream use. They change only if the term learns a projection.

        Args:
            features: (n, d), as wide as the embeddings.

        Returns:
            (n, d).
        """
        return features

    def summary(self) -> dict[str, float]:
        """Return numbers of the term to log at each evaluation, by name."""
        return {}

    def measure(self, embeddings: Tensor) -> dict[str, float]:
        """Return numbers on test embeddings to log at each evaluation, by name.

        Args:
            embeddings: (n, d), the same embeddings that the diagnostics use.
        """
        return {}

    def remarks(self) -> list[str]:
        """Return sentences for the record about noteworthy final states of the term."""
        return []

    def materialize(self, name: str, shape: tuple[int, ...], init: Callable[[Tensor], Any]) -> None:
        """Give a lazy parameter its shape. Later calls must use the same shape.

        Args:
            name: name of the attribute that holds an `UninitializedParameter`.
            shape: the shape, with the width of the embeddings last.
            init: fills the tensor in place, like the functions of `torch.nn.init`.

        Raises:
            PairsError: the parameter already has another shape.
            OptionError: the parameter would not fit into memory.
        """
        parameter = getattr(self, name)
        if isinstance(parameter, nn.UninitializedParameter):
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
        """Project anchors and candidates so that s_ij = x_i . y_j.

        Args:
            pairs: anchors (A, d) and candidates (C, d).

        Returns:
            x (A, h), y (C, h) and an upper bound of |x_i . y_j|, or None without a bound. x and y are the same tensor
            if anchors and candidates are.
        """
        x = y = full_precision(pairs.anchors)
        if pairs.candidates is not pairs.anchors:
            y = full_precision(pairs.candidates)
        if self.similarity == "bilinear":
            return x @ self.W.to(x.dtype), y, None
        if self.similarity != "cosine":
            return x, y, None
        unit = normalize(x)
        if y is x:
            return unit, unit, 1.0
        return unit, normalize(y), 1.0

    def build_for(self, embeddings: Tensor) -> None:
        """Create missing parameters with the width and device of the embeddings.

        Args:
            embeddings: (A, d).

        Raises:
            PairsError: the parameters have another width.
        """
        held = self._parameters or self._modules  # most terms have none, and iterating over parameters is slow
        lazy = bool(held) and any(isinstance(each, nn.UninitializedParameter) for each in self.parameters())
        self.build(embeddings.shape[1])
        if lazy:
            self.to(embeddings.device)

    def matrix_key(self) -> object:
        """Return a key of the similarity matrix. Terms with equal keys share one pass.

        Cosine and dot products are shared by all terms. Each bilinear W and each custom projection has its own key.
        """
        return self.similarity if self.keeps_directions else id(self)

    @property
    def keeps_directions(self) -> bool:
        """Return whether each row of x and y is a multiple of its embedding."""
        return self.similarity != "bilinear" and type(self).project is Objective.project

    def forward(self, pairs: Input | term_values.GlobalPairs | Tensor, *views: Tensor) -> Tensor:
        """Return the unweighted loss of this term, (), with gradient.

        Args:
            pairs: as in `Composite.forward`.
            views: as in `Composite.forward`.

        Raises:
            PairsError: as in `Composite.forward`.
        """
        return Composite([self], [1.0]).forward(pairs, *views).loss

    def extra_repr(self) -> str:
        return str(self.term())

    # A lazy parameter without a shape is not saved, and takes the shape of what it loads.

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        lazy = {name: p for name, p in self._parameters.items() if isinstance(p, nn.UninitializedParameter)}
        self._parameters.update(dict.fromkeys(lazy))
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self._parameters.update(lazy)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name, parameter in self._parameters.items():
            if isinstance(parameter, nn.UninitializedParameter) and prefix + name in state_dict:
                parameter.materialize(state_dict[prefix + name].shape)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def is_base(self) -> bool:
        """Return whether this is a base objective, which needs positives, and not a regularizer."""
        return registry.name_of(type(self)) is None or entry_of(self).kind == "objective"

    def term(self, weight: float | None = None) -> spec.Term:
        """Return this objective as a term of the grammar, with its given options.

        Args:
            weight: the weight to write, >= 0. None writes no weight.
        """
        return spec.Term(self.registered_name(), tuple(self.given.items()), weight)


class Composite(nn.Module):
    """A weighted sum of terms. Terms with the same similarity share one pass. A call returns an `Outcome`: `forward`.

        >>> dipole.objective("infonce + 0.1*dp").weights
        [1.0, 0.1]

    Args:
        terms: one or more objectives and regularizers.
        weights: one number for each term. The default is the registered weight: 1, or the paper's lambda for a
            regularizer.

    Raises:
        OptionError: there is no term, one is no Objective, or the number of weights differs from that of terms.
        SpecError: no weights are given, and the class of a term is not registered.
    """

    def __init__(self, terms: Sequence[Objective], weights: Sequence[float] | None = None) -> None:
        super().__init__()
        if not terms or not all(isinstance(each, Objective) for each in terms):
            raise OptionError(f"Composite needs one term at least, each an Objective as [InfoNCE()], got {terms!r}.")
        if weights is not None and len(weights) != len(terms):
            raise OptionError(f"Composite needs a weight for each of {len(terms)} terms, got {len(weights)}.")
        self.terms = nn.ModuleList(terms)
        self.weights = [entry_of(term).weight for term in terms] if weights is None else list(weights)
        self.names = spec.numbered([term.registered_name() for term in terms])

    def __iter__(self) -> Iterator[tuple[str, float, Objective]]:
        for name, weight, term in zip(self.names, self.weights, self.terms, strict=True):
            assert isinstance(term, Objective)
            yield name, weight, term

    def __str__(self) -> str:
        terms = [term.term(None if weight == 1 and term.is_base() else weight) for _, weight, term in self]
        return spec.format_terms(terms)

    def build(self, dim: int, features: int | None = None) -> "Composite":
        """Create all parameters for embeddings of width `dim`. Call it before you build the optimizer.

        Args:
            dim: width of the embeddings, >= 1.
            features: width of the encoder's features, for terms with `on_features`. None means `dim`.

        Returns:
            The objective itself.

        Raises:
            PairsError: a term already has parameters of another width.
            OptionError: `dim` is not an integer >= 1, or the parameters would not fit into memory.
        """
        spec.check_whole("dim", dim)
        for _, _, term in self:
            term.build(features if features is not None and term.on_features else dim)
        return self

    @uncompiled  # the compiler would break it into ten graphs, which are no faster
    def forward(self, pairs: Input | term_values.GlobalPairs | Tensor, *views: Tensor) -> Outcome:
        """Evaluate the objective on the embeddings of a batch.

        Args:
            pairs: an `EncodedBatch`, `Pairs`, a tuple of `Pairs` whose losses are averaged, or the first of two or more
                views, (B, d). With several ranks each rank gives its own rows.
            views: the other views, (B, d) each, if `pairs` is a view. `objective(z1, z2)` is
                `objective(Pairs.from_views([z1, z2]))`: SimCLR's pairs, with all other instances as negatives.

        Returns:
            An `Outcome` with `loss`, (), with gradient, and `terms`, the value of each term by name.

        Raises:
            PairsError: rows do not fit together, there is a single view, Pairs and views are both given, or a term
                cannot use the pairs (labels missing, too few positives, a different width).
        """
        if isinstance(pairs, Tensor):
            pairs = Pairs.from_views((pairs, *views))
        elif views:
            got = f"{type(pairs).__name__} and {counted(len(views), 'view')}"
            raise PairsError(f"views are tensors (B, d), as in objective(z1, z2), and Pairs stand alone. Got {got}.")
        terms = {name: (weight, term) for name, weight, term in self}
        if isinstance(pairs, Pairs) and world_size() == 1:
            return term_values.evaluate_terms(terms, term_values.GlobalPairs((pairs,)))  # nothing to gather
        return term_values.evaluate_terms(terms, all_gather_pairs(pairs))

    @property
    def positives_wanted(self) -> int | None:
        """Largest number of positives that a term needs. None if any number will do."""
        return max((term.positives_wanted for _, _, term in self if term.positives_wanted is not None), default=None)

    def sharpness(self) -> tuple[float, float]:
        """Return (t_pos, t_neg) of the first term with unequal weights (`Objective.weights`), or (1, 2)."""
        return next((term.weights() for _, _, term in self if any(term.weights())), SHARPNESS)

    def after_step(self, learning_rate: float, step: int | None = None, total: int | None = None) -> None:
        """Update all terms. Call it after each optimizer step.

        Args:
            learning_rate: learning rate of this step, >= 0.
            step: number of finished steps, including this one, >= 1. None if unknown.
            total: number of steps of the whole run. None if unknown.
        """
        for _, weight, term in self:
            when = {"step": step, "total": total}
            term.after_step(learning_rate, weight, **{key: when[key] for key in timed(type(term).after_step)})

    def transform(self, features: Tensor) -> Tensor:
        """Return features for downstream use: L Phi(x) if a term learns a projection, else unchanged.

        Args:
            features: Phi(x), (n, d), with the width that the terms were built for.

        Returns:
            (n, d).
        """
        for _, _, term in self:
            features = term.transform(features)
        return features


def objective(text: str, dim: int | None = None) -> Composite:
    """Build an objective from text such as `infonce(temperature=0.5) + 0.1*dp(delta_pos=0.1, delta_neg=0.5)`.

        >>> loss_of = objective("infonce(temperature=0.5) + 0.1*dp", dim=16)
        >>> outcome = loss_of(torch.randn(8, 16), torch.randn(8, 16))
        >>> sorted(outcome.terms)
        ['dp', 'infonce']

    Args:
        text: weighted sum of registered names with options. See `dipole list` and `dipole show NAME`.
        dim: width of the embeddings, >= 1. Give it if you build an optimizer and a term has parameters (bilinear
            similarity, prototypes, CLLR's L). Without it they are created at the first call.

    Returns:
        A module (`Composite`). `objective(pairs)` or `objective(z1, z2)` returns an `Outcome` with `.loss`, (), and
        `.terms`.

    Raises:
        SpecError: the text is invalid. The message has a caret under the error, the allowed values and the nearest
            name.
        PairsError: the option `dim` of a term differs from `dim`.
        OptionError: `dim` is not an integer >= 1, or parameters of that width would not fit into memory.
    """
    terms, weights = [], []
    for term in spec.parse(text):
        start, end = term.name_start, term.name_start + len(term.name)
        try:
            entry = registry.get(term.name)
            if entry.kind == "diagnostic":
                others = ", ".join(each.name for each in registry.entries() if each.kind != "diagnostic")
                raise SpecError(f"{entry.name!r} is a diagnostic and has no gradient. Terms are {others}.")
            if isinstance(entry.target, type) and not issubclass(entry.target, Objective):
                raise SpecError(f"{entry.name!r} is no subclass of dipole.Objective, so it is no term.")
            weight = entry.weight if term.weight is None else term.weight
            if not 0 <= weight <= spec.LARGEST_NUMBER:
                start, end = term.start, term.name_start
                raise SpecError(f"the weight of {entry.name} must be >= 0 and at most 1e+30, got {weight:g}.")
            built = entry.target(**dict(term.options))
            if not isinstance(built, Objective):
                raise SpecError(f"{entry.name!r} returns no dipole.Objective, so it is no term.")
            terms.append(built)
        except (SpecError, OptionError) as error:
            if isinstance(error, OptionError):
                spans = dict(zip(dict(term.options), term.option_spans, strict=True))
                start, end = spans.get(error.option, (term.name_start, term.end))
            raise SpecError(f"{error}\n{spec.caret(text, start, end)}") from None
        weights.append(weight)
    composite = Composite(terms, weights)
    if dim is not None:
        return composite.build(dim)
    return composite
