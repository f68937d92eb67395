"""Both sides of every inequality of one run, and the reasons for those that cannot be computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, cast

import torch
from pydantic_core import from_json, to_json
from torch import Tensor

from dipole.core.evaluation import diagnostics
from dipole.core.evaluation.arrays import Array, as_classes, as_matrix
from dipole.core.evaluation.theory import arora, cllr, lmcl
from dipole.core.evaluation.theory.latent import Latent, check_scale, collision, some_collision
from dipole.core.evaluation.theory.theorems import ARORA, LMCL, THEOREMS, Choices, RunFacts, Theorem
from dipole.core.utils.errors import DataError, OptionError
from dipole.core.utils.text import counted

__all__ = ["Inequality", "Quantity", "Report", "measure"]

TOLERANCE = 1e-9
BY_KEY = {theorem.key: theorem for theorem in THEOREMS}
FEWEST = 10  # points per class that are kept where points are chosen, as far as classes have them
MARGINS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45)  # delta+ of the curve of LMCL's Theorem 3


@dataclass(frozen=True)
class Quantity:
    """One number.

    Args:
        name: its name.
        value: its value.
        about: its meaning.
        error: its standard error if it was sampled, else 0.
    """

    name: str
    value: float
    about: str
    error: float = 0.0


@dataclass(frozen=True)
class Inequality:
    """Both sides of one theorem, or all of several, in ascending order.

    Args:
        key: of its theorem.
        case: tells rows of one theorem apart.
        sides: (what it is, value) of each.
        free: numbers that no paper gives, by name.
    """

    key: str
    case: str
    sides: tuple[tuple[str, float], ...]
    free: Mapping[str, float] = field(default_factory=dict)

    @property
    def theorem(self) -> Theorem:
        """Return the theorem."""
        return BY_KEY[self.key]

    @property
    def holds(self) -> bool:
        """Return whether each side is at most the next, up to rounding."""
        values = [value for _, value in self.sides]
        room = TOLERANCE * max(1.0, *(abs(value) for value in values))
        return all(left <= right + room for left, right in pairwise(values))


@dataclass
class Report:
    """The theorems of one run.

    Args:
        choices: the options.
        points: number of points used.
        classes: number of their classes.
        chosen_from: all points and classes.
        quantities: single numbers.
        inequalities: both sides of each theorem.
        curves: numbers to draw, by name and axis.
        missing: theorem key -> why it was not computed.
    """

    choices: Choices
    points: int = 0
    classes: int = 0
    chosen_from: tuple[int, int] = (0, 0)
    quantities: list[Quantity] = field(default_factory=list)
    inequalities: list[Inequality] = field(default_factory=list)
    curves: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def _add(self, name: str, value: float, about: str, error: float = 0.0) -> float:
        self.quantities.append(Quantity(name, value, about, error))
        return value

    def _hold(self, key: str, case: str, *sides: tuple[str, float], **free: float) -> None:
        self.inequalities.append(Inequality(key, case, sides, free))

    def value(self, name: str) -> float:
        """Return the value of a quantity.

        Args:
            name: of the quantity.
        """
        return next(each.value for each in self.quantities if each.name == name)

    @property
    def broken(self) -> list[Inequality]:
        """Return violated inequalities that hold on any features. They mean a bug."""
        return [each for each in self.inequalities if each.theorem.always and not each.holds]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values. A number that is not finite is None."""
        of_theorem = ("paper", "name", "always", "assumption")
        found = asdict(self) | {
            "chosen_from": dict(zip(("points", "classes"), self.chosen_from, strict=True)),
            "quantities": {q.name: {"value": q.value, "error": q.error, "about": q.about} for q in self.quantities},
            "inequalities": [
                asdict(each)
                | {name: getattr(each.theorem, name) for name in of_theorem}
                | {"sides": [{"label": label, "value": value} for label, value in each.sides], "holds": each.holds}
                for each in self.inequalities
            ],
        }
        return cast(dict[str, Any], from_json(to_json(found, inf_nan_mode="null")))


def measure(
    features: Array,
    labels: Array | None,
    choices: Choices | None = None,
    *,
    facts: RunFacts | None = None,
    metrics: Sequence[Mapping[str, Any]] = (),
    projected: Array | None = None,
) -> Report:
    """Evaluate every theorem for which there are data.

    Args:
        features: (n >= 2, d) f(x). Arora's theorems take them as they are, LMCL's on the unit sphere.
        labels: (n,) classes, or None. A negative number is no label.
        choices: options of the theorems. The default is `Choices()`.
        facts: what the run's objective and record say.
        metrics: lines of metrics.jsonl.
        projected: (n, H) L Phi(x) of any length, for CLLR's distances. The default is `features`.

    Returns:
        All numbers, both sides of every inequality, and reasons for missing ones.

    Raises:
        DataError: features that are not finite, too large, or fewer than two; labels of another number or no integers.
        OptionError: a slack `mu` that does not fit the margin.
    """
    choices, facts = choices or Choices(), facts or RunFacts()
    features = as_matrix("features", features, 2, DataError).cpu().double()
    check_scale(features)
    if labels is not None:
        labels = as_classes("labels", labels, len(features), DataError).cpu()
        if not bool((labels >= 0).any()):
            labels = None
    report = Report(choices)
    chosen = choose(labels, len(features), choices)
    x, y = features[chosen], None
    report.points, report.chosen_from = len(x), (len(features), 0)
    if labels is None:
        _miss(report, "needs labels: give some with --labels (blocks:N takes N rows in a row)")
    else:
        y = labels[chosen]
        report.classes = len(y.unique())
        report.chosen_from = (len(features), len(labels[labels >= 0].unique()))
        _arora(report, Latent.of(x, y, choices.prior))
    _lmcl(report, x, y, facts)
    if projected is not None:
        x = as_matrix("projected", projected, 2, DataError).cpu().double()[chosen]
    _cllr(report, x, facts, metrics)
    return report


def _miss(report: Report, reason: str, paper: str = "") -> None:
    """Note why the theorems about classes, of one paper or of all, are not computed."""
    for theorem in THEOREMS:
        if "labels" in theorem.needs and paper in ("", theorem.paper):
            report.missing[theorem.key] = reason


def choose(labels: Tensor | None, n: int, choices: Choices) -> Tensor:
    """Return at most `choices.points` indices. Use fewer classes if each would keep only a handful of points."""
    generator = torch.Generator().manual_seed(choices.seed)
    y = torch.zeros(n) if labels is None else labels.cpu()
    rows = torch.arange(n)[y >= 0]
    if len(rows) <= choices.points:
        return rows
    names = y[rows].unique()
    keep = max(2, choices.points // FEWEST)
    if len(names) > keep:
        names = names[torch.randperm(len(names), generator=generator)[:keep]]
        rows = rows[torch.isin(y[rows], names)]
    order = torch.randperm(len(rows), generator=generator)[: choices.points]
    return rows[order].sort().values


def _arora(report: Report, points: Latent) -> None:
    if points.classes < 2:
        _miss(report, "needs two classes (a label below 0 is none): with one, tau = 1 and every bound is 0/0", ARORA)
        return
    c = report.choices
    report._add("tau", collision(points.prior), "chance that two classes are the same")
    report._add(f"tau_{c.k}", some_collision(points.prior, c.k), f"chance that one of {c.k} negatives collides")
    report._add(f"tau'_{c.k}", collision(points.prior, c.k), f"chance that all of {c.k} negatives collide")
    R = report._add("R", arora.radius(points), "max ||f(x)||")
    s = report._add("s(f)", arora.deviation(points), "deviation within classes")
    tuples = c.tuples or len(points.features)
    gen = arora.generalization(R, c.rademacher, tuples, c.confidence, c.constant)
    report._add("Gen_M", gen, f"M = {tuples}, constant {c.constant:g} and Rad_S(F) {c.rademacher:g} are free")
    for loss in c.losses:
        _one_negative(report, points, loss, s, gen)
        try:
            _several_negatives(report, points, loss, s, gen)
        except OptionError as error:
            report.missing[f"theorem_6_1 ({loss})"] = str(error)
    _margin(report, points)


def _one_negative(report: Report, points: Latent, loss: str, s: float, gen: float) -> None:
    c, prior = report.choices, points.prior
    free = {"constant": c.constant, "rademacher": c.rademacher}
    un = arora.unsupervised_loss(points, loss)
    mean = arora.mean_classifier_loss(points, loss)
    block = arora.block_loss(points, loss, c.block, c.draws, c.seed)
    report._add(f"L_un {loss}", un.whole, "one negative")
    report._add(f"L_un^= {loss}", un.same, "negative of the same class")
    report._add(f"L_un^!= {loss}", un.different, "negative of another class")
    report._add(f"L_un^block {loss}", block.whole, f"blocks of {c.block}", block.error)
    report._add(f"L_sup^mu {loss}", mean, "mean classifier, two classes")
    best = _trained(report, points, loss, 1, f"L_sup {loss}", "trained classifier, two classes")
    left, bound = ("L_sup^mu", mean), arora.lemma_4_3(loss, 1, un.whole, prior)
    report._hold("lemma_4_3", loss, left, ("(L_un - tau)/(1 - tau)", bound))
    right = ("(L_un - tau + Gen_M)/(1 - tau)", arora.lemma_4_3(loss, 1, un.whole, prior, gen))
    report._hold("theorem_4_1", loss, left, right, **free)
    report._hold("lemma_4_4", loss, ("L_un^=", un.same), ("1 + c' s(f)", arora.lemma_4_4(loss, s)))
    right = ("L_un^!= + beta s(f) + eta Gen_M", arora.theorem_6_1(loss, 1, un.different, s, prior, gen))
    report._hold("theorem_4_5", loss, ("L_sup", best), left, right, **free)
    middle = ("(L_un^block - tau)/(1 - tau)", arora.lemma_4_3(loss, 1, block.whole, prior))
    report._hold("proposition_6_2", f"{loss}, b = {c.block}", left, middle, ("(L_un - tau)/(1 - tau)", bound))


def _trained(report: Report, points: Latent, loss: str, k: int, name: str, about: str) -> float:
    best = arora.trained_loss(points, loss, k, report.choices.tasks, report.choices.seed)
    fitted = "all tasks" if best.tasks == best.of else f"{best.tasks} of {counted(best.of, 'task')}"
    return report._add(name, best.loss, f"{about}, {fitted}", best.error)


def _several_negatives(report: Report, points: Latent, loss: str, s: float, gen: float) -> None:
    c, k = report.choices, report.choices.k
    un = arora.unsupervised_loss(points, loss, k)
    mean = arora.mean_classifier_loss(points, loss, k)
    left = (f"L_sup^mu, k = {k}", mean)
    if k > 1:
        report._add(f"L_un {loss}, k = {k}", un.whole, f"{counted(k, 'negative')}")
        report._add(f"L_un^!= {loss}, k = {k}", un.different, "negatives of other classes, where there are some")
        report._add(f"L_un^= {loss}, k = {k}", un.same, "negatives of the same class, where there are some")
        report._add(f"L_sup^mu {loss}, k = {k}", mean, "mean classifier, tasks of Sec. 6.1")
        right = ("(L_un - tau_k E l(0))/(1 - tau_k)", arora.lemma_4_3(loss, k, un.whole, points.prior))
        report._hold("lemma_4_3", f"{loss}, k = {k} (App. B.1)", left, right)
        if points.classes > k:
            distinct = arora.mean_classifier_loss(points, loss, k, "distinct")
            report._add(f"L_sup^mu {loss}, {k + 1}-way", distinct, f"mean classifier, {k + 1} distinct classes")
            _trained(report, points, loss, k, f"L_sup {loss}, {k + 1}-way", "trained classifier")
        else:
            reason = f"tasks of {k + 1} distinct classes need as many, there are {points.classes}"
            report.missing[f"L_sup {loss}, {k + 1}-way"] = reason
    right = ("Theorem B.1's bound", arora.theorem_6_1(loss, k, un.different, s, points.prior, gen))
    report._hold("theorem_6_1", f"{loss}, k = {k}", left, right, constant=c.constant, rademacher=c.rademacher)


def _margin(report: Report, points: Latent) -> None:
    c = report.choices
    if "hinge" not in c.losses:
        report.missing["lemma_5_1"] = "is about the hinge loss: add --loss hinge"
        return
    sigma = report._add("sigma", arora.spread(points), "sub-Gaussian in every class: max ||f(x) - mu_c||")
    gamma = arora.margin(report.value("R"), sigma, c.epsilon, c.gamma_constant)
    report._add("gamma", gamma, f"margin of Lemma 5.1 at eps = {c.epsilon:g}")
    given = {"epsilon": c.epsilon, "gamma_constant": c.gamma_constant}
    free = {name: value for name, value in given.items() if value is not None}
    left = ("L_un^!=", report.value("L_un^!= hinge"))
    right = ("gamma L_gamma,sup^mu + eps", arora.lemma_5_1(points, gamma, c.epsilon))
    report._hold("lemma_5_1", "hinge", left, right, **free)


def _lmcl(report: Report, x: Tensor, y: Tensor | None, facts: RunFacts) -> None:
    c, n = report.choices, len(x)
    low = facts.delta_pos if c.delta_pos is None else c.delta_pos
    high = facts.delta_neg if c.delta_neg is None else c.delta_neg
    if low >= high:
        raise OptionError(f"delta_pos must be below delta_neg, got {low:g} and {high:g}.", "delta_pos")
    mean = report._add("mean D", diagnostics.mean_distance(x), "mean normalised distance of pairs")
    report._hold("lmcl_eq_5", "", ("mean D", mean), ("N/(2N - 2)", diagnostics.mean_distance_ceiling(n)))
    mu, nearest = lmcl.coverage(x)
    report._add("coverage", float(nearest.max()), "eps of LMCL Theorem 1: largest min |D - mu| over mu")
    report.curves["lmcl_theorem_1"] = {"mu": mu.tolist(), "nearest": nearest.tolist()}
    r1 = lmcl.regularizer(x, low, high, facts.reduction)
    report._add("R1", r1, f"distance polarization, {facts.reduction}, of all pairs")
    weight, at = 0.1, "lambda = 0.1 (the paper; no dp here)"
    if facts.dp_weight is not None:
        weight, at = facts.dp_weight, f"lambda = {facts.dp_weight:g}"
    if weight > 0:
        report._hold("lmcl_theorem_3", f"R1, {at}", ("R1", r1), ("4/lambda", 4 / weight))
    if y is None:
        return
    if report.classes < 2:
        _miss(report, "needs two classes", LMCL)
        return
    within, between = lmcl.separation(x, y)
    report._add("max D within", within, "largest distance within a class (LMCL Theorem 2: at most 1/2 - tau)")
    report._add("min D between", between, "smallest distance between classes (at least 1/2)")
    classes, width = float(report.classes), float(x.shape[1])
    report._hold("lmcl_theorem_2", "room for one direction a class", ("C + 1", classes + 1), ("d", width))
    if math.isfinite(within):
        report._hold("lmcl_theorem_2", "this embedding", ("max D within", within), ("min D between", between))
    ratio = report._add("(K_max/K_min)/C", diagnostics.class_ratio(y), "LMCL Theorem 3")
    report._add("delta+ of the proof", lmcl.proof_delta_pos(x, y), "as many pairs lie below it as share a class")
    if c.mu is not None and not 0 < c.mu < high - low:
        raise OptionError(f"mu must lie between 0 and delta_neg - delta_pos = {high - low:g}, got {c.mu:g}.", "mu")
    curve: dict[str, list[float]] = {"delta_pos": [], "error": [], "middle": [], "bound": []}
    for delta in sorted({*(m for m in MARGINS if m < high), low}):
        slack = c.mu
        if slack is not None and slack >= high - delta:
            slack = None
        error, bound = diagnostics.similarity_error(x, y, delta, high, slack, weight or 1.0)
        if weight <= 0:
            bound = math.inf
        middle = (high - delta) * lmcl.regularizer(x, delta, high, facts.reduction) + ratio  # Eq. 13
        for name, value in zip(curve, (delta, error, middle, bound), strict=True):
            curve[name].append(value)
        if delta == low:
            sides = ("similarity error", error), ("(delta- - delta+) R1 + K/C", middle), ("4 (..)/lambda + K/C", bound)
            report._hold("lmcl_theorem_3", f"{low:g} .. {high:g}, {at}", *sides)
    report.curves["lmcl_theorem_3"] = curve
    _softmax(report, x, y, facts)


def _softmax(report: Report, x: Tensor, y: Tensor, facts: RunFacts) -> None:
    c = report.choices
    unit = torch.nn.functional.normalize(x, dim=1)
    soft = report._add("L_SM", lmcl.softmax_loss(unit, y), "softmax classifier, nats")
    if facts.nce is None:
        report.missing["lmcl_theorem_4"] = "needs L_NCE: the run has no infonce term with a logged loss"
        return
    if facts.negatives is None or facts.negatives < 1:
        report.missing["lmcl_theorem_4"] = "needs n: the record has no number of negatives"
        return
    report._add("L_NCE", facts.nce, "infonce term, last logged, nats")
    report._add("Q1", math.sqrt(1 + 1 / facts.negatives), f"sqrt(1 + 1/n), n = {facts.negatives:g}")
    report._add("Q2", -math.log1p(-c.confidence) * math.log(facts.negatives) ** 2, "log(1/delta) log^2(n)")
    bound = lmcl.generalization(facts.negatives, len(x), c.rademacher, c.confidence, c.constant)
    sides = ("|L_SM - L_NCE|", abs(soft - facts.nce)), ("Q1 Rad/N + sqrt(Q2/N)", bound)
    report._hold("lmcl_theorem_4", "", *sides, constant=c.constant, rademacher=c.rademacher)


def _cllr(report: Report, x: Tensor, facts: RunFacts, metrics: Sequence[Mapping[str, Any]]) -> None:
    c = report.choices
    ratios = diagnostics.min_max_ratios(x)
    if len(ratios):
        mean = float(ratios.mean())
        least = report._add("min-max ratio", float(ratios.min()), f"smallest over points; their mean is {mean:.4g}")
        report._add("var[D/E D]", cllr.relative_variance(x), f"CLLR Theorem 1, H = {x.shape[1]}")
        if facts.cllr_weight is None or facts.alpha is None:
            report.missing["cllr_theorem_3"] = "needs alpha and lambda: the objective has no cllr term"
        else:
            implied = cllr.implied_constant(least, facts.alpha, facts.cllr_weight)
            report._add("largest C(X)", implied, "with which CLLR Theorem 3 holds of these points")
            bound = facts.alpha * facts.cllr_weight * c.data_constant
            sides = ("alpha lambda C(X)", bound), ("(D_max - D_min)/D_min", least)
            report._hold("cllr_theorem_3", "smallest over points", *sides, data_constant=c.data_constant)
    else:
        for key in ("cllr_theorem_1", "cllr_theorem_3"):
            report.missing[key] = "all points coincide: no distance to compare"
    way = cllr.stationarity(metrics, c.smoothness)
    if way is None:
        report.missing["cllr_theorem_2"] = "needs the objective's gradient norm in metrics.jsonl; this run logged none"
        return
    report._add("delta", way.gradient, "largest logged gradient norm")
    report._add("F_0 - F*", way.descent, "first logged loss less the smallest")
    report._add("implied S", way.implied_smoothness, "smallest S with which CLLR Theorem 2 holds at every logged step")
    sides = ("min_t ||grad F||^2", way.least[-1]), ("delta sqrt(2 S (F_0 - F*)/T)", way.bound[-1])
    report._hold("cllr_theorem_2", f"T = {way.steps[-1]}", *sides, smoothness=c.smoothness)
    steps = [float(step) for step in way.steps]
    report.curves["cllr_theorem_2"] = {"step": steps, "least": way.least, "bound": way.bound}
