"""Subjects of the checks: dipole's objectives and other losses, behind one interface."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dipole.core.conformance.layouts import CLASSES, LAYOUTS, VIEWS, WIDTH, Layout, Leaves, in_order
from dipole.core.conformance.reference import REFERENCES, Case
from dipole.core.conformance.stops import set_back
from dipole.core.objectives.objective import Composite, Objective, Outcome, objective
from dipole.core.objectives.options import options_of
from dipole.core.objectives.registry import registry
from dipole.core.objectives.spec import format_terms, parse

Loss = Callable[..., Tensor]  # (instance, layout, leaves) -> scalar


@dataclass(frozen=True)
class Result:
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
class Subject:
    """A loss under test.

    Args:
        name: shown in the report.
        build: returns a fresh instance; keyword arguments override options.
        call: (instance, layout, leaves) -> scalar tensor.
        truth: like `call`, by independent loops. None if there is no reference. Options
            that were overridden when the instance was built come as keyword arguments.
        temperature: True if `build` accepts a temperature, which some checks lower.
        takes_pairs: True for dipole's objectives, False for what is called as loss(a, b).
        layouts: the batches it can be called on.
        read: builds an instance from the text of str(). None if it cannot be written as text.
        detached: whether it stops a gradient on purpose, or which rows get none (`Objective.detached`).
        stateful: whether its value depends on earlier calls. The state is reset after each call.
        flat: whether it ignores a range of cosines on purpose, as a margin does.
        twin: like `truth`, but fast: dipole's implementation of the reference, for large batches.
        dim: the only width of embeddings that it takes. None if it takes any.
        classes: number of classes of the labels. None for the usual ones.
    """

    name: str
    build: Callable[..., Any]
    call: Loss
    truth: Loss | None = None
    temperature: bool = False
    takes_pairs: bool = False
    layouts: tuple[Layout, ...] = (VIEWS,)
    read: Callable[[str], Composite] | None = None
    detached: bool | tuple[str, ...] = False
    stateful: bool = False
    flat: bool = False
    twin: Loss | None = None
    dim: int | None = None
    classes: int | None = None

    @property
    def views(self) -> Layout:
        """Two views of five instances."""
        return self.layouts[0]

    def batch(self, count: int, width: int = WIDTH) -> Layout:
        """Return two views of `count` instances, of its own width if it has one."""
        return self.in_order(torch.arange(count), width)

    def in_order(self, order: Tensor, width: int = WIDTH) -> Layout:
        """Return two views of instances in another order."""
        return in_order(order, self.dim or width, self.classes or CLASSES)

    def make(
        self,
        layout: Layout | None = None,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        temperature: float | None = None,
    ) -> Any:
        """Return a new instance for a layout, with random parameters that depend only on the seed.

        Args:
            layout: the batch that it will be called on. None for `views`.
            dtype: of its parameters.
            seed: of their draw.
            temperature: that it is built with, where it accepts one.
        """
        lowered = {"temperature": temperature} if self.temperature and temperature is not None else {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            instance = self.build(**lowered)
            if self.takes_pairs:
                instance.build((layout or self.views).width)
                # Parameters start at special points (identity matrices). Checks need general ones.
                with torch.no_grad():
                    for parameter in instance.parameters():
                        parameter.add_(torch.randn_like(parameter), alpha=0.2)
        return instance.to(dtype) if isinstance(instance, nn.Module) else instance

    def set_back(self, instance: Any) -> AbstractContextManager[None]:
        """Return a context that restores the state of a stateful instance.

        Args:
            instance: what `make` gave.
        """
        return set_back(instance) if self.stateful else nullcontext()

    def result(self, instance: Any, layout: Layout, leaves: Leaves, loss: Loss | None = None) -> Result:
        """Return value and gradients of the loss for leaves and all parameters.

        Args:
            instance: what `make` gave.
            layout: the batch.
            leaves: by name, as `Layout.leaves` draws them.
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
        wanted = leaves | parameters_of(instance)
        found: tuple[Tensor | None, ...] = (None,) * len(wanted)
        if value.requires_grad:
            found = torch.autograd.grad(value.sum(), list(wanted.values()), allow_unused=True)
        gradients = {n: None if g is None else g.double() for n, g in zip(wanted, found, strict=True)}
        return Result(value.detach().double().reshape(()), gradients)


@dataclass(frozen=True)
class Declared:
    """What a loss does on purpose: its attributes of these names, and the arguments of `check_objective`.

    Args:
        detached: it stops a gradient, or the names of the inputs that get none.
        stateful: its value depends on earlier calls.
        flat: it ignores a range of cosines.
    """

    detached: bool | tuple[str, ...] = False
    stateful: bool = False
    flat: bool = False

    def and_of(self, *owners: Any) -> Declared:
        """Add the attributes of losses or their classes. Names win over True."""
        stops = (self.detached, *(getattr(each, "detached", False) for each in owners))
        return Declared(
            next((each for each in stops if each and isinstance(each, tuple)), True in stops),
            self.stateful or any(getattr(each, "stateful", False) is True for each in owners),
            self.flat or any(getattr(each, "flat", False) is True for each in owners),
        )


def parameters_of(instance: Any) -> dict[str, Tensor]:
    """Return trainable parameters by name. {} for a plain callable."""
    return dict(instance.named_parameters()) if isinstance(instance, nn.Module) else {}


def foreign(
    target: Any,
    name: str,
    options: dict[str, Any] | None = None,
    reference: str | None = None,
    says: Declared | None = None,
) -> Subject:
    """Wrap a loss called as loss(a, b) on two (n, d) tensors: an instance, or a class or function that returns one.

    `says` adds to what the loss declares itself. The other arguments are as in `check_objective`.
    """
    options = options or {}
    builds = inspect.isclass(target) or inspect.isroutine(target)

    def build(**overrides: Any) -> Any:
        return target(**options | overrides) if builds else copy.deepcopy(target)

    def call(instance: Any, layout: Layout, leaves: Leaves) -> Tensor:
        value: Tensor = instance(leaves["a"], leaves["b"])
        return value

    owners = (target,) if builds and inspect.isclass(target) else (target, build())
    says = (says or Declared()).and_of(*owners)
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

        truth, twin = partial(compared, by_loops), partial(compared, evaluate)
    adjustable = builds and "temperature" in inspect.signature(target).parameters
    return Subject(name, build, call, truth, adjustable, twin=twin, **vars(says))


def native(text: str) -> Subject:
    """Wrap a registered objective, written as text. It may be a regularizer alone."""
    adjustable = [
        "temperature" in registry.get(term.name).defaults and dict(term.options).get("temperature") != "learned"
        for term in parse(text)
    ]
    written = read(text)
    known = all(_reference(term) for _, _, term in written)

    def build(**overrides: Any) -> Composite:
        terms = parse(text)
        if overrides:
            terms = [
                type(t)(t.name, tuple((dict(t.options) | overrides).items()), t.weight) if lowered else t
                for t, lowered in zip(terms, adjustable, strict=True)
            ]
        return read(format_terms(terms))

    return Subject(
        text,
        build,
        evaluate,
        _truth if known else None,
        any(adjustable),
        takes_pairs=True,
        layouts=LAYOUTS,
        read=read,
        **vars(Declared().and_of(*written.terms)),
    )


def unregistered(target: type[Objective], name: str, options: dict[str, Any] | None = None) -> Subject:
    """Wrap a subclass of Objective that is not registered."""
    options = options or {}

    def build(**overrides: Any) -> Composite:
        return Composite([target(**options | overrides)], [1.0])

    return Subject(
        name,
        build,
        evaluate,
        _truth if hasattr(target, "reference") else None,
        "temperature" in inspect.signature(target).parameters,
        takes_pairs=True,
        layouts=LAYOUTS,
        **vars(Declared().and_of(target)),
    )


def evaluate(instance: Composite, layout: Layout, leaves: Leaves) -> Tensor:
    """Return the loss of a composite on the pairs of a layout."""
    outcome: Outcome = instance(layout.build(**leaves))
    return outcome.loss


def by_loops(instance: Composite, layout: Layout, leaves: Leaves) -> Tensor:
    """Return the weighted sum of the references of a composite's terms, with their options and parameters."""
    pairs = layout.build(**leaves)
    total = torch.zeros((), dtype=torch.float64)
    for _, weight, term in instance:
        loops = _reference(term)
        assert loops is not None
        options = {option.name: option.default for option in options_of(type(term).__init__)} | term.given
        case = Case.of(pairs, parameters_of(term))
        still = term.detached if isinstance(term.detached, tuple) else ()
        for name in still:
            values: dict[str, Any] = {name: [row.detach() for row in getattr(case, name)]}
            case = replace(case, **values)
        total = total + weight * loops(case, **options)
    return total


def _truth(instance: Composite, layout: Layout, leaves: Leaves, **overrides: Any) -> Tensor:
    return by_loops(instance, layout, leaves)


def _reference(term: Objective) -> Callable[..., Tensor] | None:
    """Return the reference of a term: the static method `reference` of its class, or dipole's own by name."""
    own: Callable[..., Tensor] | None = getattr(type(term), "reference", None)
    return own or REFERENCES.get(term.registered_name())


def read(text: str) -> Composite:
    """Build an objective from text. A regularizer alone gets weight 1, while `dipole.objective` refuses it."""
    terms = parse(text)
    if any(registry.get(term.name).kind == "objective" for term in terms):
        return objective(text)
    built = [registry.get(term.name).target(**dict(term.options)) for term in terms]
    return Composite(built, [1.0 if term.weight is None else term.weight for term in terms])
