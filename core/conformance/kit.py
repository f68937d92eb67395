"""The conformance kit: test whether a loss does what its formula says, in every precision and edge case.

    dipole check infonce                                   # from the command line
    report = dipole.check_objective("infonce + 0.1*dp")    # from Python
    @parametrize_with_checks(["infonce", MyLoss])          # from pytest

It checks dipole's own objectives, plug-ins, and any loss that is called as loss(a, b). The checks are in
`dipole.core.conformance.checks.CHECKS`. docs/background/conformance.md shows results for other libraries.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

from dipole.core.conformance import accuracy_checks, call_checks, close_checks, edge_checks  # noqa: F401, they fill the table
from dipole.core.conformance.checks import CHECKS as CHECKS
from dipole.core.conformance.checks import Check, CheckReport, Skipped, run
from dipole.core.conformance.subjects import (
    ANY,
    UNDECLARED,
    BatchNeeds,
    Declared,
    Subject,
    declared,
    foreign,
    native,
    needed,
    unregistered,
)
from dipole.core.objectives import engine as engines
from dipole.core.objectives.objective import Composite, Objective
from dipole.core.objectives.registry import registry
from dipole.core.objectives.spec import check_whole
from dipole.core.utils.errors import OptionError, SpecError, nearest


def check_objective(
    target: Any,
    *,
    options: dict[str, Any] | None = None,
    reference: str | None = None,
    slow: bool = False,
    only: Iterable[str] | None = None,
    engine: str | None = None,
    detached: bool | tuple[str, ...] = False,
    stateful: bool = False,
    flat: bool = False,
    temperatures: Sequence[str] = (),
    dim: int | None = None,
    labels: int | None = None,
    scores: bool = False,
    ranks: bool = True,
) -> CheckReport:
    """Run the conformance checks on one loss.

    Args:
        target: an objective as text ("infonce(temperature=0.1) + 0.1*dp"; a regularizer may stand alone);
            "package.module:name"; a class or function that builds a loss; a function loss(a, b); or an instance. A
            subclass of `Objective` gets Pairs, everything else is called as loss(a, b) on two (n, d) tensors.
        options: arguments of a class or function.
        reference: the objective that a loss(a, b) should equal, as text. Without one, its gradient is compared with
            finite differences, and its low precision with itself in float64.
        slow: also run the checks that take more than a few seconds (code generation by torch.compile).
        only: names of checks. The default is all.
        engine: of the row statistics, "eager" or "triton"; None for the usual one. Kernels run on the GPU, or in
            Triton's interpreter without one.
        detached: the loss stops a gradient on purpose: True for one somewhere inside, or the names of inputs without
            gradient, ("b",). Your own loss can have an attribute `detached` instead.
        stateful: the value depends on earlier calls on purpose. Your own loss can have an attribute `stateful`.
        flat: the loss ignores a range of cosines on purpose, as a margin does, or all but the hardest negatives. Your
            own loss can have an attribute `flat`.
        temperatures: arguments of a class or function that are temperatures. `temperature` always is one. Your own loss
            can mark an argument: `Annotated[float, TEMPERATURE]`.
        dim: width of the embeddings, for a loss that takes no other.
        labels: number of classes. A loss of two arguments is called as loss(z, labels) with the rows of both views, one
            of three arguments as loss(a, b, labels).
        scores: call the loss as loss(a, b, scores), with a score in [0, 1] for each pair of rows.
        ranks: also compare two processes with one, unless `only` names the checks.

    Returns:
        A `CheckReport`: `.ok`, `.rows`, `.table()`.

    Raises:
        SpecError: the text, the path, an option in the text, a check's name or the reference is wrong, or `options`,
            `reference`, `detached`, `stateful` or `flat` are given for what has its own.
        OptionError: a class or function cannot be built from `options`. (Of a subclass of `Objective` that is a failure
            in the report.)
        EngineError: there is no such engine, or it cannot run here.

    Example:
        >>> def loss(a, b):
        ...     return (1 - torch.cosine_similarity(a, b)).mean()
        >>> dipole.check_objective(loss, only=["gradcheck"]).ok
        True
    """
    with engines.using(engine):
        says = Declared(detached=detached, stateful=stateful, flat=flat)
        subject = subject_of(target, options, reference, says, tuple(temperatures), BatchNeeds(dim, labels, scores))
        return run(subject, chosen(slow, only, ranks))


def chosen(slow: bool = False, only: Iterable[str] | None = None, ranks: bool = True) -> list[Check]:
    """Return the checks of a run, in the order of the table."""
    if only is None:
        return [c for c in CHECKS if (slow or not c.slow) and (ranks or c.name != "ranks")]
    if isinstance(only, str):
        only = [only]
    names, wanted = [check.name for check in CHECKS], list(only)
    for name in wanted or [""]:
        if name not in names:
            raise SpecError(f"there is no check {name!r}.{nearest(name, names)} Checks: {', '.join(names)}.")
    return [c for c in CHECKS if c.name in wanted]


def subject_of(
    target: Any,
    options: dict[str, Any] | None = None,
    reference: str | None = None,
    says: Declared = UNDECLARED,
    temperatures: tuple[str, ...] = (),
    needs: BatchNeeds = ANY,
) -> Subject:
    """Return the subject of the checks. `check_objective` describes the arguments."""
    for which, number in (("dim", needs.dim), ("labels", needs.labels)):
        if number is not None:
            check_whole(which, number)
    if needs.labels is not None and needs.scores:
        raise SpecError("give labels or scores, not both.")
    if isinstance(target, Subject):
        return target
    if isinstance(target, str) and re.fullmatch(r"[\w./\\-]*[A-Za-z_]\w*\.(py:)?[A-Za-z_]\w*", target):
        raise SpecError(f"{target}: give a loss of your own as module:Class, such as my_losses:MyLoss of my_losses.py.")
    name = target if isinstance(target, str) else getattr(target, "__name__", type(target).__name__)
    text: str | None = None
    if isinstance(target, str) and ":" in target:
        target = load(target)
    if isinstance(target, str):
        _refuse(options, f"write them into the text: {target}({_written(options)})", name)
        text = target
    elif isinstance(target, Composite | Objective):
        _refuse(options, "an instance has its options already", name)
        text = str(target) if isinstance(target, Composite) else str(target.term())
    if text is not None or (inspect.isclass(target) and issubclass(target, Objective)):
        _refuse_of_pairs(name, reference, says, needs.scores or bool(temperatures))
        if text is None:
            return unregistered(target, name, options, needs)
        return native(text, needs)
    if not callable(target):
        raise SpecError(f"{name} cannot be called: a loss is called as loss(a, b), or give a class or function.")
    # A function of two arguments, or of three with labels or scores, is the loss itself. Others build it.
    if inspect.isroutine(target) and needed(target, options or {}) in (2, 2 + bool(needs.scores or needs.labels)):
        says = declared(says, target)
        target, options = partial(target, **(options or {})), None
    if not (inspect.isclass(target) or inspect.isroutine(target)):
        _refuse(options, "an instance has its options already", name)
    try:
        subject = foreign(target, name, options, reference, says, temperatures, needs)
        subject.make()
    except SpecError:
        raise
    except Exception as error:
        raise OptionError(
            f"{name} cannot be built from the options {options or {}}: {type(error).__name__}: {error}. Give what its "
            "constructor needs with --option NAME=VALUE, or wrap it: def build(): return ITS_CLASS(...). A function "
            "loss(a, b, labels) or loss(a, b, scores) needs --labels CLASSES or --scores."
        ) from error
    return subject


def load(path: str) -> Any:
    """Import the object at "package.module:name", also from the working directory."""
    module_name, _, attribute = path.partition(":")
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        found: Any = import_module(module_name)
    except Exception as error:
        raise SpecError(f"{path}: cannot import {module_name!r}: {type(error).__name__}: {error}") from error
    finally:
        if added:
            sys.path.remove(here)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise SpecError(f"{path}: {found.__name__} has no {part!r}.{nearest(part, dir(found))}")
        found = getattr(found, part)
    return found


def all_subjects() -> list[str]:
    """Return every registered objective and regularizer, with plug-ins, as `dipole check --all` runs them."""
    return [entry.name for entry in registry.entries() if entry.kind != "diagnostic"]


def parametrize_with_checks(
    targets: Sequence[Any], *, slow: bool = False, only: Iterable[str] | None = None, ranks: bool = True
) -> Callable[[Any], Any]:
    """Decorate a test so that it runs once for each target and check.

        >>> @dipole.parametrize_with_checks(["infonce", "infonce + 0.1*dp"], only=["gradcheck"])
        ... def test_my_losses(subject, check):
        ...     check(subject)

    Needs pytest. A check that does not apply is skipped.

    Args:
        targets: as `check_objective` takes them. A loss(a, b) has no options and no reference.
        slow: also the checks that take more than a few seconds.
        only: names of checks. The default is all.
        ranks: compare two processes with one as well, unless `only` names the checks.

    Returns:
        A decorator for a function test(subject, check).

    Raises:
        SpecError: a target or a check's name is wrong.
        OptionError: a class or function cannot be built without options.
    """
    import pytest

    if isinstance(targets, str):
        targets = [targets]

    def runner(check: Check) -> Callable[[Subject], str]:
        @wraps(check.run)
        def call(subject: Subject) -> str:
            try:
                return check.run(subject)
            except Skipped as reason:
                pytest.skip(str(reason))

        return call

    cases = [
        pytest.param(subject, runner(check), id=f"{subject.name}-{check.name}".replace(" ", "_"))
        for subject in map(subject_of, targets)
        for check in chosen(slow, only, ranks)
    ]
    return pytest.mark.parametrize(("subject", "check"), cases)


def _written(options: dict[str, Any] | None) -> str:
    return ", ".join(f"{key}={value}" for key, value in (options or {}).items())


def _refuse(options: dict[str, Any] | None, cure: str, name: str) -> None:
    if options:
        raise SpecError(f"{name} takes no separate options ({_written(options)}): {cure}.")


def _refuse_of_pairs(name: str, reference: str | None, says: Declared, more: bool) -> None:
    """Refuse what only a loss(a, b) takes."""
    if reference is not None:
        raise SpecError(f"{name} has its own reference; --reference {reference!r} is for a loss called as loss(a, b).")
    if more:
        raise SpecError(
            f"{name} is an Objective: it gets Pairs, not scores, and its options are marked as temperatures "
            "with Annotated[float, TEMPERATURE]."
        )
    if says != UNDECLARED:
        raise SpecError(f"{name} is an Objective: `detached`, `stateful` and `flat` are attributes of its class.")
