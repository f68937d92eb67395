"""Subjects of the checks: dipole's objectives and other losses, behind one interface."""

import copy
import inspect
import warnings
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dipole.core.conformance.layouts import CLASSES, LAYOUTS, VIEWS, WIDTH, Layout, Leaves, in_order
from dipole.core.conformance.modes import set_back
from dipole.core.conformance.reference import REFERENCES, Case
from dipole.core.objectives.objective import Composite, Objective, Outcome, objective
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.registry import registry
from dipole.core.objectives.spec import Term, format_terms, options_of, parse
from dipole.core.utils.errors import SpecError, nearest

Loss = Callable[..., Tensor]  # (instance, layout, leaves) -> scalar


@dataclass(frozen=True)
class LossAndGradients:
    """A loss and its gradients in float64.

    Args:
        value: ().
        gradients: by the name of a leaf or parameter, with its shape (...). None if it got no gradient.
    """

    value: Tensor
    gradients: dict[str, Tensor | None]

    @property
    def finite(self) -> bool:
        """Return whether all numbers are finite."""
        return bool(self.value.isfinite()) and all(
            g is None or bool(g.isfinite().all()) for g in self.gradients.values()
        )


@dataclass(frozen=True)
class BatchNeeds:
    """Requirements of a loss on its batches.

    Args:
        dim: width of the embeddings. None if it takes any.
        labels: number of classes, for a loss that takes labels.
        scores: whether it takes a score for each pair.
    """

    dim: int | None = None
    labels: int | None = None
    scores: bool = False


@dataclass(frozen=True, kw_only=True)
class Declared:
    """Intended behaviour that a check would report: attributes of a loss and arguments of `check_objective`."""

    detached: bool | tuple[str, ...] = False
    stateful: bool = False
    flat: bool = False


def declared(says: Declared, *owners: Any) -> Declared:
    """Add the attributes of losses or their classes to the given ones. Names win over True."""
    stops = (says.detached, *(getattr(each, "detached", False) for each in owners))
    return Declared(
        detached=next((each for each in stops if each and isinstance(each, tuple)), True in stops),
        stateful=says.stateful or any(getattr(each, "stateful", False) is True for each in owners),
        flat=says.flat or any(getattr(each, "flat", False) is True for each in owners),
    )


UNDECLARED, ANY = Declared(), BatchNeeds()


@dataclass(frozen=True)
class Subject(Declared):
    """A loss under test.

    Args:
        name: shown in the report.
        build: returns a fresh instance. Keyword arguments override options.
        call: (instance, layout, leaves) -> scalar tensor.
        truth: like `call`, by independent loops. None if there is no reference. Options
            that were overridden when the instance was built come as keyword arguments.
        temperatures: options of `build` that are temperatures, which some checks lower.
        takes_pairs: True for dipole's objectives, False for what is called as loss(a, b).
        layouts: the batches it can be called on.
        read: builds an instance from the text of str(). None if it cannot be written as text.
        detached: whether it stops a gradient on purpose, or which rows get none (`Objective.detached`).
        stateful: whether its value depends on earlier calls. The state is reset after each call.
        flat: whether it ignores a range of cosines, or all but the hardest negatives, on purpose.
        twin: like `truth`, but fast: dipole's implementation of the reference, for large batches.
        needs: what its batches must look like.
        refit: builds the same subject for other batches. None for dipole's objectives.
    """

    name: str
    build: Callable[..., Any]
    call: Loss
    truth: Loss | None = None
    temperatures: tuple[str, ...] = ()
    takes_pairs: bool = False
    layouts: tuple[Layout, ...] = (VIEWS,)
    read: Callable[[str], Composite] | None = None
    twin: Loss | None = None
    needs: BatchNeeds = ANY
    refit: Callable[[BatchNeeds], "Subject"] | None = None

    @property
    def views(self) -> Layout:
        """Two views of five instances."""
        return self.layouts[0]

    def batch(self, count: int, width: int = WIDTH) -> Layout:
        """Return two views of `count` instances, of its own width if it has one.

        Args:
            count: number of instances.
            width: of the embeddings, if it takes any.
        """
        return self.in_order(torch.arange(count), width)

    def in_order(self, order: Tensor, width: int = WIDTH) -> Layout:
        """Return two views of instances in another order.

        Args:
            order: (B,) long, the instances.
            width: of the embeddings, if it takes any.
        """
        return in_order(order, self.needs.dim or width, self.needs.labels or CLASSES)

    def make(
        self,
        layout: Layout | None = None,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        temperature: float | dict[str, float] | None = None,
    ) -> Any:
        """Return a new instance for a layout, with random parameters that depend only on the seed.

        Args:
            layout: the batch that it will be called on. None for `views`.
            dtype: of its parameters.
            seed: of their draw.
            temperature: that it is built with, where it accepts one. A number sets all of its temperatures.
        """
        lowered = temperature if isinstance(temperature, dict) else {}
        if isinstance(temperature, int | float):
            lowered = dict.fromkeys(self.temperatures, temperature)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            instance = self.build(**lowered)
            if self.takes_pairs:
                instance.build((layout or self.views).width)
                # Parameters start at special points (identity matrices). Checks need general ones.
                with torch.no_grad():
                    for parameter in instance.parameters():
                        parameter.add_(torch.randn_like(parameter), alpha=0.2)
        if isinstance(instance, nn.Module):
            return instance.to(dtype)
        return instance

    def set_back(self, instance: Any) -> AbstractContextManager[None]:
        """Return a context that restores the state of a stateful instance.

        Args:
            instance: what `make` gave.
        """
        if self.stateful:
            return set_back(instance)
        return nullcontext()

    def result(self, instance: Any, layout: Layout, leaves: Leaves, loss: Loss | None = None) -> LossAndGradients:
        """Return value and gradients of the loss for leaves and all parameters.

        Args:
            instance: what `make` gave.
            layout: the batch.
            leaves: (...) by name, as `Layout.leaves` draws them.
            loss: another loss with the same arguments. None: `call`.

        Raises:
            TypeError: the loss is not a scalar tensor.
        """
        with warnings.catch_warnings(), self.set_back(instance):
            warnings.simplefilter("ignore")
            value = (loss or self.call)(instance, layout, leaves)
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"the loss must be a scalar tensor, got {got}")
        wanted = named(leaves, instance)
        found: tuple[Tensor | None, ...] = (None,) * len(wanted)
        if value.requires_grad:
            found = torch.autograd.grad(value.sum(), list(wanted.values()), allow_unused=True)
        gradients = tree_map_only(Tensor, Tensor.double, dict(zip(wanted, found, strict=True)))
        return LossAndGradients(value.detach().double().reshape(()), gradients)


def parameters_of(instance: Any) -> dict[str, Tensor]:
    """Return trainable parameters by name. {} for a plain callable."""
    if isinstance(instance, nn.Module):
        return dict(instance.named_parameters())
    return {}


def named(leaves: Leaves, instance: Any) -> dict[str, Tensor]:
    """Return leaves and trainable parameters by name. A parameter may be called as a leaf."""
    own = parameters_of(instance).items()
    return leaves | {f"parameter {name}" if name in leaves else name: value for name, value in own}


def foreign(
    target: Any,
    name: str,
    options: dict[str, Any] | None = None,
    reference: str | None = None,
    says: Declared = UNDECLARED,
    temperatures: tuple[str, ...] = (),
    needs: BatchNeeds = ANY,
) -> Subject:
    """Wrap a loss called as loss(a, b): an instance, or a class or function that returns one."""
    options = options or {}
    builds = inspect.isclass(target) or inspect.isroutine(target)

    def build(**overrides: Any) -> Any:
        if builds:
            return target(**options | overrides)
        return copy.deepcopy(target)

    def call(instance: Any, layout: Layout, leaves: Leaves) -> Tensor:
        a, b = leaves["a"], leaves["b"]
        value: Tensor
        if needs.scores and layout.scores is not None:
            value = instance(a, b, layout.scores.to(a))
        elif needs.labels is None or layout.labels is None:
            value = instance(a, b)
        elif needed(instance) == 3:
            value = instance(a, b, layout.labels.to(a.device)[: len(a)])
        else:
            value = instance(torch.cat([a, b]), layout.labels.to(a.device))
        return value

    owners = (target,) if builds and inspect.isclass(target) else (target, build())
    says = declared(says, *owners)
    detached = says.detached
    truth = twin = None
    if reference is not None:
        model = native(reference)

        def compared(by: Loss, instance: Any, layout: Layout, leaves: Leaves, **overrides: Any) -> Tensor:
            if isinstance(detached, tuple):
                leaves = {name: leaf.detach() if name in detached else leaf for name, leaf in leaves.items()}
            value = by(model.make(layout, **overrides), layout, leaves)
            if detached is not True:
                return value
            own = call(instance, layout, leaves)  # where it stops a gradient only it knows: the values are compared
            return value.detach() + own - own.detach()

        truth, twin = partial(compared, by_loops), partial(compared, loss_of_leaves)
    return Subject(
        name,
        build,
        call,
        truth,
        _temperatures(target, name, temperatures) if builds else (),
        layouts=(in_order(torch.arange(5), needs.dim or WIDTH, needs.labels or CLASSES),),
        twin=twin,
        needs=needs,
        refit=partial(foreign, target, name, options, reference, says, temperatures),
        **vars(says),
    )


def needed(function: Any, given: Container[str] = ()) -> int:
    """Return the number of positional arguments without a default that are not given."""
    if isinstance(function, nn.Module):
        function = function.forward
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a function of C does not say
        return 2
    return sum(p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD and p.name not in given for p in parameters)


def _temperatures(target: Any, name: str, named: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments that are temperatures: those named, those marked, and `temperature`."""
    parameters = inspect.signature(target).parameters
    for each in named:
        if each not in parameters:
            raise SpecError(f"{name} has no argument {each!r} for a temperature.{nearest(each, parameters)}")
    try:
        options = options_of(target)
    except (NameError, TypeError):  # annotations that cannot be read
        options = ()
    marked = {option.name for option in options if option.temperature} | {"temperature", *named}
    return tuple(each for each in parameters if each in marked)


def native(text: str, needs: BatchNeeds = ANY) -> Subject:
    """Wrap a registered objective, written as text. It may be a regularizer alone."""
    terms = [term for term in read(text).terms if isinstance(term, Objective)]
    adjustable = dict.fromkeys(name for term in parse(text) for name in _adjustable(term))
    known = all(_reference(term) for term in terms)
    return _of_pairs(text, partial(read, text), known, tuple(adjustable), needs, terms, read)


def unregistered(target: Any, name: str, options: dict[str, Any] | None = None, needs: BatchNeeds = ANY) -> Subject:
    """Wrap a subclass of Objective that is not registered."""

    def build(**overrides: Any) -> Composite:
        return Composite([target(**(options or {}) | overrides)], [1.0])

    temperatures = tuple(option.name for option in options_of(target) if option.temperature)
    return _of_pairs(name, build, hasattr(target, "reference"), temperatures, needs, [target])


def _of_pairs(
    name: str,
    build: Callable[..., Composite],
    known: bool,
    temperatures: tuple[str, ...],
    needs: BatchNeeds,
    owners: Sequence[Any],
    read: Callable[[str], Composite] | None = None,
) -> Subject:
    return Subject(
        name,
        build,
        loss_of_leaves,
        by_loops if known else None,
        temperatures,
        takes_pairs=True,
        layouts=tuple(each.fitted(needs.dim, needs.labels) for each in LAYOUTS),
        read=read,
        needs=needs,
        **vars(declared(UNDECLARED, *owners)),
    )


def loss_of_leaves(instance: Composite, layout: Layout, leaves: Leaves) -> Tensor:
    """Return the loss of a composite on the pairs of a layout."""
    outcome: Outcome = instance(layout.build(**leaves))
    return outcome.loss


def by_loops(instance: Composite, layout: Layout, leaves: Leaves, **overrides: Any) -> Tensor:
    """Return the weighted sum of the references of a composite's terms."""
    pairs = layout.build(**leaves)
    total = torch.zeros((), dtype=torch.float64)
    for _, weight, term in instance:
        total = total + weight * term_by_loops(term, pairs)
    return total


def term_by_loops(term: Any, pairs: Pairs) -> Tensor:
    """Return the value of a term by its reference, with its options and parameters."""
    loops = _reference(term)
    assert loops is not None
    options = {option.name: option.default for option in options_of(term.__class__)} | term.given
    case = Case.of(pairs, parameters_of(term))
    still = term.detached if isinstance(term.detached, tuple) else ()
    for name in still:
        values: dict[str, Any] = {name: [row.detach() for row in getattr(case, name)]}
        case = replace(case, **values)
    return loops(case, **options)


def _reference(term: Objective) -> Callable[..., Tensor] | None:
    """Return the reference of a term: the static method `reference` of its class, or dipole's own by name."""
    own: Callable[..., Tensor] | None = getattr(type(term), "reference", None)
    return own or REFERENCES.get(term.registered_name())


def _adjustable(term: Term) -> list[str]:
    """Return the options of a term that are temperatures, and not learned."""
    options, given = registry.get(term.name).options, dict(term.options)
    return [option.name for option in options if option.temperature and given.get(option.name) != "learned"]


def read(text: str, **temperatures: float) -> Composite:
    """Build an objective from text, with other temperatures. A regularizer alone gets weight 1."""
    plain = objective(text)  # names what is wrong with a text
    terms = []
    for term in parse(text):
        lowered = {name: temperatures[name] for name in _adjustable(term) if name in temperatures}
        weight = term.weight
        if weight is None and not any(each.is_base() for _, _, each in plain):
            weight = 1.0
        terms.append(replace(term, options=tuple((dict(term.options) | lowered).items()), weight=weight))
    return objective(format_terms(terms))
