"""Shared parts of all checks: their table, their outcomes, and comparisons with a tolerance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dipole.core.conformance.layouts import Layout, Leaves
from dipole.core.conformance.subjects import LossAndGradients, Subject

EXACT = 1e-9  # float64 against float64
SINGLE = 1e-4  # float32 against float64, hard pairs at temperature 0.01
HALF_VALUE, HALF_GRADIENT = 0.02, 0.05  # half-precision inputs against float64 on the same rounded inputs
LOW_TEMPERATURE, MODERATE_TEMPERATURE = 0.01, 0.05
MOST_ENTRIES = 100  # of a parameter under gradcheck
ROWS, COLUMNS = 8, 16  # of the batches for low precision


class Failed(AssertionError):  # noqa: N818
    """A check found the fault that the message names. The checks in `explains` must fail for the same cause.

    `by_reference` says that the loss differs from its reference in float64. The first such check is the cause of all.
    """

    def __init__(self, message: str, explains: tuple[str, ...] = (), by_reference: bool = False) -> None:
        super().__init__(message)
        self.explains = explains
        self.by_reference = by_reference


class Skipped(Exception):  # noqa: N818
    """A check does not apply, for the reason in the message."""


@dataclass(frozen=True)
class Check:
    """A named check. The first line of the docstring of `run` is the full requirement."""

    name: str  # as `--only` takes it
    about: str  # what must hold, in a few plain words
    run: Callable[[Subject], str]  # returns the finding
    slow: bool = False  # it takes more than a few seconds


CHECKS: list[Check] = []


def check(name: str, about: str, slow: bool = False) -> Callable[[Callable[[Subject], str]], Callable[[Subject], str]]:
    """Add a function to the table of checks."""

    def add(run: Callable[[Subject], str]) -> Callable[[Subject], str]:
        CHECKS.append(Check(name, about, run, slow))
        return run

    return add


def relative(found: Tensor, true: Tensor, least: float = 1.0) -> float:
    """Norm of the difference over the norm of the truth, or over `least` if the truth is smaller."""
    return float((found - true).norm() / true.norm().clamp_min(least))


def value_error(found: LossAndGradients, true: LossAndGradients) -> float:
    return relative(found.value, true.value)


def gradient_error(found: LossAndGradients, true: LossAndGradients, least: float = 1.0) -> float:
    """Largest relative error over the leaves and parameters that have a gradient in either."""
    worst = 0.0
    for name, expected in true.gradients.items():
        got = found.gradients[name]
        if got is None:
            if expected is None:
                continue
            got = torch.zeros_like(expected)
        elif expected is None:
            expected = torch.zeros_like(got)
        worst = max(worst, relative(got, expected, least))
    return worst


def demand_equal(
    found: LossAndGradients, true: LossAndGradients, where: str, limit: float = EXACT, other: str = "expected"
) -> float:
    """Return the larger error of value and gradient. Raise Failed if it is above the limit."""
    errors = {"value": value_error(found, true), "gradient": gradient_error(found, true)}
    for what, off in errors.items():
        if not off <= limit:
            values = f"{found.value.item():.10g}, {other} {true.value.item():.10g}"
            raise Failed(f"the {what} is off by {off:.2g} {where}: {values}", by_reference=other == "reference")
    return max(errors.values())


def exactly(leaves: Leaves) -> Leaves:
    """Return the same leaves in float64 on the processor."""
    return {name: leaf.detach().cpu().double().requires_grad_() for name, leaf in leaves.items()}


def demand_finite(result: LossAndGradients, where: str) -> None:
    """Raise Failed if the value or any gradient is not finite."""
    if not result.value.isfinite():
        raise Failed(f"{where}: the value is {result.value.item()}")
    bad = [name for name, g in result.gradients.items() if g is not None and not g.isfinite().all()]
    if bad:
        raise Failed(f"{where}: the gradient of {', '.join(bad)} is not finite (value {result.value.item():.4g})")


def truth_of(subject: Subject, layout: Layout, leaves: Leaves, temperature: float) -> LossAndGradients:
    """The reference in float64 if there is one, else the subject itself in float64."""
    exact = exactly(leaves)
    instance = subject.make(layout, temperature=temperature)
    if subject.truth is not None:
        loops = partial(subject.truth, temperature=temperature)
        true = subject.result(instance, layout, exact, loops)
        if true.finite:  # the loops shift no exponential
            return true
    return subject.result(instance, layout, exact)
