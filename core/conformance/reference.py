"""Every objective once more, as loops in float64 written from its formula: what the conformance kit compares against.

Nothing here is fast, stable or shared with the implementations. A `Case` holds the same data as `Pairs` in plain lists;
embeddings are 1-d float64 tensors only so that autograd yields the reference gradient. The equations and their sources
are named function by function; sums run over indices, exponentials are not shifted, logarithms are taken last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dipole.core.objectives.pairs import Pairs

Vector = Tensor  # (d,) float64
Number = Tensor  # () float64


@dataclass(frozen=True)
class Case:
    """Anchors, candidates and who is what to whom, as lists of plain rows.

    Args:
        anchors: A rows, (d,) float64 each.
        candidates: C rows, (d,) float64 each.
        positives: of each anchor, the indices of its positives among the candidates.
        dropped: of each anchor, candidates that are neither positives nor negatives.
        labels: class of each anchor.
        candidate_labels: class of each candidate.
        views: positives are views of the anchor's own instance, as `Pairs.views`.
        among: so many anchors, the first ones, are candidates already.
        first_negative: candidates before it are nobody's negatives.
        of_block: anchors of each block, block after block; 0: there are no blocks.
        draw: what random choices among blocks depend on.
        instances: instance of each anchor.
        others: candidates that another encoder made than the anchors.
        candidate_instances: instance of each candidate.
        anchor_views: view of each anchor.
        candidate_views: view of each candidate; -1: none.
        queue: candidates that are past embeddings.
        queue_of_keys: the candidates' encoder made them, not the anchors'.
        side: so many anchors, which are candidates, are of one encoder and the rest of another; 0: there is one.
        parameters: the learned matrices by name, as lists of rows, (d,) each; a number is a list of one ().
    """

    anchors: list[Vector]
    candidates: list[Vector]
    positives: list[list[int]]
    dropped: list[list[int]]
    labels: list[int] | None = None
    candidate_labels: list[int] | None = None
    views: bool = True
    among: int = 0
    first_negative: int = 0
    of_block: int = 0
    draw: int = 0
    instances: list[int] = field(default_factory=list)
    others: list[int] = field(default_factory=list)
    candidate_instances: list[int] | None = None
    anchor_views: list[int] = field(default_factory=list)
    candidate_views: list[int] = field(default_factory=list)
    queue: list[int] = field(default_factory=list)
    queue_of_keys: bool = False
    side: int = 0
    parameters: dict[str, list[Vector]] = field(default_factory=dict)

    @classmethod
    def of(cls, pairs: Pairs, parameters: dict[str, Tensor] | None = None) -> Case:
        """Pairs and parameters unpacked into lists; gradients flow back to the tensors given.

        Args:
            pairs: float64.
            parameters: by name, matrices (m, d) or numbers ().
        """
        views = pairs.candidate_view.tolist()
        of_anchors = {-1, *pairs.view.tolist()}
        strangers = [j for j, view in enumerate(views) if view == -1]
        return cls(
            anchors=list(pairs.anchors.unbind()),
            candidates=list(pairs.candidates.unbind()),
            positives=[[j for j in row if j >= 0] for row in pairs.positives.tolist()],
            dropped=[[j for j in row if j >= 0] for row in pairs.dropped.tolist()],
            labels=None if pairs.labels is None else pairs.labels.tolist(),
            candidate_labels=None if pairs.candidate_labels is None else pairs.candidate_labels.tolist(),
            views=pairs.views,
            among=pairs.known.among,
            first_negative=pairs.first_negative,
            of_block=pairs.known.of_block,
            draw=pairs.known.draw,
            instances=list(range(len(pairs.anchors))) if pairs.index is None else pairs.index.tolist(),
            others=[j for j, view in enumerate(views) if view not in of_anchors],
            candidate_instances=None if pairs.candidate_index is None else pairs.candidate_index.tolist(),
            anchor_views=pairs.view.tolist(),
            candidate_views=views,
            queue=strangers if pairs.known.queue else [],
            queue_of_keys=pairs.known.queue_of_keys,
            side=len(pairs.anchors) // 2 if pairs.known.sides else 0,
            parameters={
                name: list(value.unbind()) if value.ndim else [value] for name, value in (parameters or {}).items()
            },
        )

    def negatives(self, i: int) -> list[int]:
        """Indices of the candidates that are neither positives of an anchor nor dropped for it, ascending.

        Args:
            i: index of the anchor.
        """
        out = set(self.positives[i]) | set(self.dropped[i])
        return [j for j in range(self.first_negative, len(self.candidates)) if j not in out]

    def all_but(self, positives: Sequence[int], i: int) -> list[int]:
        """Candidates that are neither listed nor dropped for an anchor, ascending; `first_negative` does not count.

        Args:
            positives: indices of candidates.
            i: index of the anchor.
        """
        return [j for j in range(len(self.candidates)) if j not in positives and j not in self.dropped[i]]

    def counted(self) -> list[int]:
        """Anchors the mean runs over: those with at least one positive."""
        return [i for i in range(len(self.anchors)) if self.positives[i]]


def dot(x: Vector, y: Vector) -> Number:
    return (x * y).sum()


def norm(x: Vector) -> Number:
    return dot(x, x).sqrt()


def unit(x: Vector) -> Vector:
    """x at length 1; the zero vector stays zero."""
    return x / norm(x) if x.any() else x


def cosine(x: Vector, y: Vector) -> Number:
    """Cosine of two vectors, (); 0 if either is zero.

    Args:
        x: (d,).
        y: (d,).
    """
    return dot(unit(x), unit(y))


def total(values: Iterable[Number]) -> Number:
    """Sum, (), that is a float64 zero when there is nothing to add.

    Args:
        values: numbers, () each.
    """
    result = torch.zeros((), dtype=torch.float64)
    for value in values:
        result = result + value
    return result


def mean(values: Sequence[Number]) -> Number:
    """Mean, (); a float64 zero when there is nothing to average.

    Args:
        values: numbers, () each.
    """
    return total(values) / len(values) if values else total(values)


def similarity_of(case: Case, similarity: str) -> Callable[[int, int], Number]:
    """s_ij for cosine, dot or bilinear (a_i^T W c_j with the rows of W in parameters["W"])."""

    def s(i: int, j: int) -> Number:
        a, c = case.anchors[i], case.candidates[j]
        if similarity == "cosine":
            return cosine(a, c)
        if similarity == "dot":
            return dot(a, c)
        return total(a[row] * dot(weights, c) for row, weights in enumerate(case.parameters["W"]))

    return s


def squared_distance(x: Vector, y: Vector) -> Number:
    """d2 of the unit vectors."""
    return 2 - 2 * cosine(x, y)


Temperature = float | str
"""A number, or "learned": then parameters["logit_scale"] is log(1/tau) (Radford et al. 2021)."""


def tau_of(case: Case, temperature: Temperature) -> float | Number:
    return 1 / case.parameters["logit_scale"][0].exp() if isinstance(temperature, str) else temperature


def infonce(
    case: Case,
    *,
    temperature: Temperature,
    similarity: str = "cosine",
    joint: bool = False,
    init: float | None = None,
) -> Number:
    """LMCL Eq. 1 and CACR Eq. 1; joint: cross-entropy of one softmax against a uniform target over the positives."""
    s, tau = similarity_of(case, similarity), tau_of(case, temperature)
    losses = []
    for i in case.counted():
        negatives = total((s(i, j) / tau).exp() for j in case.negatives(i))
        positives = [(s(i, p) / tau).exp() for p in case.positives[i]]
        if not case.negatives(i):
            losses.append(total([]))
        elif joint:
            losses.append(mean([-(e / (total(positives) + negatives)).log() for e in positives]))
        else:
            losses.append(mean([-(e / (e + negatives)).log() for e in positives]))
    return mean(losses)


def supcon(
    case: Case,
    *,
    temperature: Temperature,
    variant: str = "out",
    similarity: str = "cosine",
    init: float | None = None,
) -> Number:
    """Khosla et al. 2020, Eqs. 2 and 3: positives are all of the class where labels are known, else those given."""
    s, tau = similarity_of(case, similarity), tau_of(case, temperature)
    labels, others = case.labels, case.candidate_labels
    losses = []
    for i in range(len(case.anchors)):
        positives = case.positives[i]
        if labels is not None and labels[i] >= 0:
            assert others is not None
            positives = [j for j, y in enumerate(others) if y == labels[i] and j not in case.dropped[i]]
        if not positives:
            continue
        negatives = [j for j in case.all_but(positives, i) if j >= case.first_negative]
        shares = [(s(i, p) / tau).exp() for p in positives]
        whole = total(shares) + total((s(i, j) / tau).exp() for j in negatives)
        losses.append(-mean(shares).div(whole).log() if variant == "in" else mean([-(e / whole).log() for e in shares]))
    return mean(losses)


def siglip(
    case: Case,
    *,
    temperature: Temperature,
    init: float | None = None,
    bias: float | str = "learned",
    bias_init: float | None = None,
    similarity: str = "cosine",
) -> Number:
    """Zhai et al. 2023, Algorithm 1: -sum log sigmoid( z (t s + b) ) / n, z = 1 for positives and -1 for negatives."""
    s, tau = similarity_of(case, similarity), tau_of(case, temperature)
    b = case.parameters["bias"][0] if isinstance(bias, str) else bias
    losses = []
    for i in case.counted():
        pairs = [(1.0, p) for p in case.positives[i]] + [(-1.0, j) for j in case.negatives(i)]
        losses.append(total((1 + (-z * (s(i, j) / tau + b)).exp()).log() for z, j in pairs))
    return mean(losses)


def quickthoughts(case: Case, *, temperature: Temperature, similarity: str, init: float | None = None) -> Number:
    """Logeswaran & Lee 2018: the neighbours in one softmax with a uniform target."""
    return infonce(case, temperature=temperature, similarity=similarity, joint=True)


def cross_entropy(case: Case, *, classes: int) -> Number:
    """-log of the true class's share of sum_c e^{a_i . w_c}, the class vectors w being parameters["vectors"]."""
    assert case.labels is not None
    assert len(case.parameters["vectors"]) == classes
    losses = []
    for anchor, label in zip(case.anchors, case.labels, strict=True):
        shares = [dot(anchor, vector).exp() for vector in case.parameters["vectors"]]
        losses.append(-(shares[label] / total(shares)).log())
    return mean(losses)


def tuple_loss(case: Case, *, temperature: Temperature, init: float | None = None) -> Number:
    """LMCL Eq. 2: InfoNCE whose positives share the label."""
    labels, others = case.labels, case.candidate_labels
    assert labels is not None
    assert others is not None
    same = [
        [j for j, y in enumerate(others) if y == label and j not in dropped]
        for label, dropped in zip(labels, case.dropped, strict=True)
    ]
    return infonce(replace(case, positives=same), temperature=temperature)


def _debiased(
    case: Case, s: Callable[[int, int], Number], temperature: Temperature, rho: float, beta: float, cosine_floor: bool
) -> Number:
    """-log(e^+ / (e^+ + G)), G debiased by the class prior rho; negatives weighted by e^{beta s / temperature}."""
    tau = tau_of(case, temperature)
    losses = []
    for i in case.counted():
        negatives = case.negatives(i)
        count = len(negatives)
        if not count:
            losses.append(total([]))
            continue
        lowest = -1.0 if cosine_floor else min(s(i, j).item() for j in negatives)
        floor = count * (torch.tensor(lowest, dtype=torch.float64) / tau).exp()
        raw = [(beta * s(i, j) / tau).exp() for j in negatives]
        average = mean(raw)
        weighted = total(w / average * (s(i, j) / tau).exp() for w, j in zip(raw, negatives, strict=True))
        per_positive = []
        for p in case.positives[i]:
            e = (s(i, p) / tau).exp()
            g = (weighted - rho * count * e) / (1 - rho)
            g = g if g >= floor else floor
            per_positive.append(-(e / (e + g)).log())
        losses.append(mean(per_positive))
    return mean(losses)


def dcl(
    case: Case, *, temperature: Temperature, rho: float, similarity: str = "cosine", init: float | None = None
) -> Number:
    """Chuang et al. 2020."""
    return _debiased(case, similarity_of(case, similarity), temperature, rho, 0.0, similarity == "cosine")


def hcl(
    case: Case,
    *,
    temperature: Temperature,
    rho: float,
    beta: float,
    similarity: str = "cosine",
    init: float | None = None,
) -> Number:
    """Robinson et al. 2021."""
    return _debiased(case, similarity_of(case, similarity), temperature, rho, beta, similarity == "cosine")


def align_uniform(case: Case, *, alpha: float, t: float, align_weight: float, uniform_weight: float) -> Number:
    """Wang & Isola 2020: E ||a - p||^alpha and log E e^{-t ||z_i - z_j||^2} over pairs of different instances.

    Of two encoders each has its uniformity, and their mean counts; where a queue belongs to the anchors' encoder, they
    alone have one.
    """
    aligned = []
    for i in range(len(case.anchors)):
        a = case.anchors[i]
        d_pos = [squared_distance(a, case.candidates[p]) for p in case.positives[i]]
        if d_pos:
            aligned.append(mean([d.pow(alpha / 2) for d in d_pos]))
    sides = []
    for pairs in _within_sides(case):
        potentials = [(-t * squared_distance(x, y)).exp() for x, y in pairs]
        if potentials:
            sides.append(mean(potentials).log())
    return align_weight * mean(aligned) + uniform_weight * mean(sides)


def _within_sides(case: Case) -> list[list[tuple[Vector, Vector]]]:
    """Ordered pairs of different instances, for each encoder that the embeddings come from."""
    a, c = case.anchors, case.candidates
    if case.side:
        halves = range(case.side), range(case.side, len(a))
        return [[(a[i], a[j]) for i in half for j in half if i != j] for half in halves]
    if not case.others:
        return [
            [(a[i], c[j]) for i in range(len(a)) for j in case.negatives(i) + ([] if case.views else case.positives[i])]
        ]
    of = case.candidate_instances

    def owner(j: int) -> int | None:
        """The anchor whose instance a candidate is."""
        return None if of is None or of[j] not in case.instances else case.instances.index(of[j])

    queries, keys = [], []
    of_queries, of_keys = ([], case.queue) if case.queue_of_keys else (case.queue, [])
    for i in range(len(a)):
        doubles = {owner(j) for j in case.dropped[i] if j in case.others} - {None}
        queries += [(a[i], a[k]) for k in range(len(a)) if k != i and k not in doubles]
        queries += [(a[i], c[j]) for j in of_queries if j not in case.dropped[i]]
    for j in case.others:
        mine = owner(j)
        doubles = set() if mine is None or not case.views else set(case.dropped[mine])
        keys += [
            (c[j], c[m]) for m in case.others if m != j and (mine is None or owner(m) != mine) and m not in doubles
        ]
        keys += [(c[j], c[m]) for m in of_keys if m not in doubles]
    return [queries] if of_queries else [queries, keys]


def _conditional(distances: Sequence[Number], temperature: float, kind: str, contrastive_sign: float) -> list[Number]:
    """Weights of CACR Eqs. 3-4: e^{sign t d2}, normalised; reversed flips the sign, uniform forgets the distances."""
    sign = {"contrastive": contrastive_sign, "reversed": -contrastive_sign, "uniform": 0.0}[kind]
    raw = [(sign * temperature * d).exp() for d in distances]
    whole = total(raw)
    return [r / whole for r in raw]


def cacr(
    case: Case,
    *,
    t_pos: float,
    t_neg: float,
    cost: str = "euclidean",
    rbf_t: float = 2.0,
    positive_weights: str = "contrastive",
    negative_weights: str = "contrastive",
    detach_weights: bool = False,
    intra_batch: bool = False,
    k: int | None = None,
) -> Number:
    """CACR Eqs. 2-5; rbf: the cost of Eq. 13 and, for the repulsion, the logarithm of Eq. 14.

    `intra_batch` adds the anchors of other instances, where they are no candidates yet (App. C.2); `detach_weights` is
    the no_grad of Algorithm 3.
    """

    def point_cost(d: Number) -> Number:
        return -((-rbf_t * d).exp()) if cost == "rbf" else d

    attraction, repulsion = [], []
    for i in case.counted():
        a = case.anchors[i]
        d_pos = [squared_distance(a, case.candidates[p]) for p in case.positives[i][:k]]
        pull = _conditional(d_pos, t_pos, positive_weights, +1.0)
        pull = [w.detach() for w in pull] if detach_weights else pull
        attraction.append(total(w * point_cost(d) for w, d in zip(pull, d_pos, strict=True)))
        others = [case.candidates[j] for j in case.negatives(i)]
        if intra_batch:
            here = range(case.side) if i < case.side else range(case.side, len(case.anchors))
            fresh = here if case.side else range(case.among, len(case.anchors))
            others += [case.anchors[m] for m in fresh if case.instances[m] != case.instances[i]]
        d_neg = [squared_distance(a, c) for c in others]
        push = _conditional(d_neg, t_neg, negative_weights, -1.0)
        if others or cost == "euclidean":
            repulsion.append(-total(w * point_cost(d) for w, d in zip(push, d_neg, strict=True)))
    if cost == "rbf":
        potential = mean(repulsion)
        return mean(attraction) + (potential.log() if repulsion else total([]))
    return mean(attraction) + mean(repulsion)


def uaur(case: Case) -> Number:
    """CACR Eq. 11: expected cost of the positives minus expected cost of the negatives, all pairs alike."""
    losses = []
    for i in case.counted():
        pos = [squared_distance(case.anchors[i], case.candidates[p]) for p in case.positives[i]]
        neg = [squared_distance(case.anchors[i], case.candidates[j]) for j in case.negatives(i)]
        losses.append(mean(pos) - mean(neg))
    return mean(losses)


def triplet(case: Case, *, margin: float, mode: str) -> Number:
    """CACR App. B.5: [cost of the positives - cost of the negatives + margin]_+, expected or hardest."""
    losses = []
    for i in case.counted():
        pos = [squared_distance(case.anchors[i], case.candidates[p]) for p in case.positives[i]]
        neg = [squared_distance(case.anchors[i], case.candidates[j]) for j in case.negatives(i)]
        if not neg:
            losses.append(total([]))
            continue
        gap = max(pos) - min(neg) + margin if mode == "hardest" else mean(pos) - mean(neg) + margin
        losses.append(gap if gap > 0 else 0.0 * gap)
    return mean(losses)


def _log_softmax(scores: Sequence[Number], temperature: float | Number) -> list[Number]:
    raw = [(s / temperature).exp() for s in scores]
    whole = total(raw)
    return [(r / whole).log() for r in raw]


def sinkhorn(scores: Sequence[Sequence[float]], epsilon: float, iterations: int) -> list[list[float]]:
    """Codes (B, P) whose rows sum to 1 and whose columns are balanced: rows and columns scaled in turn."""
    rows, columns = len(scores), len(scores[0])
    q = [[float(torch.tensor(s / epsilon, dtype=torch.float64).exp()) for s in row] for row in scores]
    for _ in range(iterations):
        for p in range(columns):
            mass = sum(q[b][p] for b in range(rows))
            for b in range(rows):
                q[b][p] /= mass * columns
        for b in range(rows):
            mass = sum(q[b])
            q[b] = [value / (mass * rows) for value in q[b]]
    return [[value * rows for value in row] for row in q]


def distance_polarization(case: Case, *, delta_pos: float, delta_neg: float, reduction: str = "anchor_sum") -> Number:
    """LMCL Eqs. 6-10: |min((D - delta_pos)(D - delta_neg), 0)| over all pairs of distinct instances."""
    sums, pairs = [], 0
    for i in range(len(case.anchors)):
        others = case.negatives(i) + ([] if case.views else case.positives[i])
        pairs += len(others)
        penalties = []
        for j in others:
            d = (1 - cosine(case.anchors[i], case.candidates[j])) / 2
            product = (d - delta_pos) * (d - delta_neg)
            penalties.append(-product if product < 0 else 0.0 * product)
        sums.append(total(penalties))
    if reduction == "mean":
        return total(sums) / max(pairs, 1)
    return total(sums) if reduction == "sum" else mean(sums)


def blocks(
    case: Case,
    *,
    b: int | None = None,
    k: int | None = None,
    loss: str = "logistic",
    drawn: Sequence[Sequence[int]] | None = None,
) -> Number:
    """Arora et al. Eq. 12 (b = 1: Eqs. 4-6): v_m = a . (mu_i - mu_m), logistic in base 2 or hinge.

    mu_i averages the block of anchor i, its first b positives. Of blocks, mu_m averages those of the first point of
    block m, for the k blocks that are `drawn` for each anchor (default: as `block_draw` says), or for all others.
    Elsewhere the block of anchor m is a negative of i if all of its points are negatives of i, and k takes the next k
    such blocks in cyclic order.
    """

    def block_mean(i: int) -> Vector:
        points = [case.candidates[p] for p in case.positives[i][:b]]
        return torch.stack(points).sum(0) / len(points)

    losses = []
    anchors = case.counted()
    for i in anchors:
        if case.of_block:
            count = len(case.anchors) // case.of_block
            if k is None:
                others = [m for m in range(count) if m != i // case.of_block]
            else:
                others = list(drawn[i] if drawn is not None else block_draw(case.draw, i, case.of_block, count, k))
            foreign = [m * case.of_block for m in others]
        else:
            negatives = set(case.negatives(i))
            cyclic = [m for m in anchors if m > i] + [m for m in anchors if m < i]
            foreign = [m for m in cyclic if negatives >= set(case.positives[m][:b])][:k]
        v = [dot(case.anchors[i], block_mean(i) - block_mean(m)) for m in foreign]
        if not v:
            losses.append(total([]))
        elif loss == "logistic":
            losses.append((1 + total((-x).exp() for x in v)).log() / torch.tensor(2.0, dtype=torch.float64).log())
        else:
            worst = max(1 - x for x in v)
            losses.append(worst if worst > 0 else 0.0 * worst)
    return mean(losses)


def block_draw(draw: int, point: int, of_block: int, count: int, k: int) -> list[int]:
    """The k negative blocks of a point: Floyd's sampling of the other blocks, by splitmix64 in whole numbers."""
    word, golden = 2**64, 0x9E3779B97F4A7C15

    def mixed(z: int) -> int:
        z %= word
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % word
        z = (z ^ z >> 27) * 0x94D049BB133111EB % word
        return z ^ z >> 31

    start = mixed(point * golden + mixed(draw % 2**63))
    chosen: list[int] = []
    for m in range(k):
        last = count - 1 - k + m
        number = mixed(start + (m + 1) * golden) % 2**63 % (last + 1)
        chosen.append(last if number in chosen else number)
    return [number + (number >= point // of_block) for number in chosen]


def co2(
    case: Case,
    *,
    temperature: Temperature,
    weight: float,
    consistency_temperature: float | None = None,
    similarity: str = "cosine",
    init: float | None = None,
) -> Number:
    """Wei et al. 2021: InfoNCE + weight x symmetric KL of the softmaxes over the negatives of query and positive."""
    tau = tau_of(case, temperature) if consistency_temperature is None else consistency_temperature
    s = similarity_of(case, similarity)
    between = cosine if similarity == "cosine" else dot  # candidates with candidates
    divergences = []
    for i in case.counted():
        negatives = case.negatives(i)
        if not negatives:
            divergences.append(total([]))
            continue
        positive = case.candidates[case.positives[i][0]]
        log_p = _log_softmax([s(i, j) for j in negatives], tau)
        log_q = _log_softmax([between(positive, case.candidates[j]) for j in negatives], tau)
        forward = total(x.exp() * (x - y) for x, y in zip(log_p, log_q, strict=True))
        backward = total(y.exp() * (y - x) for x, y in zip(log_p, log_q, strict=True))
        divergences.append((forward + backward) / 2)
    base = infonce(case, temperature=temperature, similarity=similarity)
    return base + weight * mean(divergences)


def swav(
    case: Case, *, prototypes: int, temperature: float, epsilon: float, iterations: int, dim: int | None = None
) -> Number:
    """Caron et al. 2020: an anchor's softmax over the prototypes predicts the codes of its positives."""
    centres = [unit(v) for v in case.parameters["prototypes"]]
    assert len(centres) == prototypes
    scores = [[dot(u, v).item() for v in centres] for u in map(unit, case.candidates)]
    codes = sinkhorn(scores, epsilon, iterations)
    losses = []
    for i in case.counted():
        z = unit(case.anchors[i])
        log_prediction = _log_softmax([dot(z, v) for v in centres], temperature)
        losses.append(
            mean([-total(q * x for q, x in zip(codes[p], log_prediction, strict=True)) for p in case.positives[i]])
        )
    return mean(losses)


def singular_values(columns: Sequence[Vector], sweeps: int = 12) -> list[Number]:
    """Singular values by one-sided Jacobi: rotate pairs of columns until all are orthogonal; their norms remain."""
    columns = list(columns)
    for _ in range(sweeps):
        for p in range(len(columns)):
            for q in range(p + 1, len(columns)):
                x, y = columns[p], columns[q]
                gamma = dot(x, y)
                if gamma.abs() <= 1e-17 * norm(x) * norm(y):
                    continue
                zeta = (dot(y, y) - dot(x, x)) / (2 * gamma)
                tangent = (1.0 if zeta >= 0 else -1.0) / (zeta.abs() + (1 + zeta * zeta).sqrt())
                c = 1 / (1 + tangent * tangent).sqrt()
                columns[p], columns[q] = c * x - c * tangent * y, c * tangent * x + c * y
    return [norm(x) for x in columns]


def low_dimensional_reconstruction(
    case: Case, *, alpha: float, norm: str, solver: str = "subgradient", features: str = "raw",
    tolerance: float = 0.0, dim: int | None = None,
) -> Number:  # fmt: skip
    """CLLR Eqs. 6-10: mean ||L^T L x - x||^2 + alpha norm(L), x before normalisation, or with features=unit after it.

    The proximal solver keeps the norm in the value and out of the gradient. The tolerance changes no value.
    """
    rows = case.parameters["L"]
    columns = [torch.stack([row[c] for row in rows]) for c in range(len(rows))]
    errors = []
    for anchor in case.anchors:
        x = anchor / dot(anchor, anchor).sqrt() if features == "unit" else anchor
        low = [dot(row, x) for row in rows]
        back = torch.stack([total(column[r] * low[r] for r in range(len(rows))) for column in columns])
        errors.append(dot(back - x, back - x))
    lengths = singular_values(columns) if norm == "nuclear" else [dot(c, c).sqrt() for c in columns]
    size = total(lengths)
    return mean(errors) + alpha * (size.detach() if solver == "proximal" else size)


def regression(case: Case) -> Number:
    """Grill et al. 2020, Eq. 2: the squared distance of unit vectors."""
    return mean([mean([squared_distance(case.anchors[i], case.candidates[p]) for p in case.positives[i]])
                 for i in case.counted()])  # fmt: skip


def _deviations(column: Sequence[Number]) -> list[Number]:
    """Numbers without their mean."""
    middle = mean(column)
    return [x - middle for x in column]


def vicreg(
    case: Case, *, invariance: float, variance: float, covariance: float, gamma: float, epsilon: float
) -> Number:
    """Bardes et al. 2022, Eqs. 1-6, distances over d as in Algorithm 1; of V views, twice the mean of v and c."""
    width = len(case.anchors[0])
    near = []
    for i in case.counted():
        gaps = [case.anchors[i] - case.candidates[p] for p in case.positives[i]]
        near.append(mean([dot(gap, gap) / width for gap in gaps]))
    rows: dict[int, list[Vector]] = {}
    for view, z in zip(case.candidate_views, case.candidates, strict=True):
        rows.setdefault(view, []).append(z)
    for view in set(case.anchor_views) - set(case.candidate_views):
        rows[view] = [z for own, z in zip(case.anchor_views, case.anchors, strict=True) if own == view]
    rows.pop(-1, None)
    hinges, squares = [], []
    for members in rows.values():
        columns = [_deviations([z[j] for z in members]) for j in range(width)]
        cov = [[total(x * y for x, y in zip(a, b, strict=True)) / max(1, len(members) - 1) for b in columns]
               for a in columns]  # fmt: skip
        below = [gamma - (cov[j][j] + epsilon).sqrt() for j in range(width)]
        hinges.append(mean([gap if gap > 0 else 0.0 * gap for gap in below]))
        squares.append(total(cov[j][k] ** 2 for j in range(width) for k in range(width) if j != k) / width)
    return invariance * mean(near) + variance * 2 * mean(hinges) + covariance * 2 * mean(squares)


def barlow_twins(case: Case, *, redundancy: float) -> Number:
    """Zbontar et al. 2021, Eqs. 1-2, 1e-5 beside the variance; views and positives in turn, weighted by their rows."""
    width = len(case.anchors[0])
    summed, rows = [], 0
    for view in dict.fromkeys(case.anchor_views):
        for place in range(max(map(len, case.positives))):
            mine = [i for i, own in enumerate(case.anchor_views) if own == view and len(case.positives[i]) > place]
            if not mine:
                continue
            twins = [[case.anchors[i] for i in mine], [case.candidates[case.positives[i][place]] for i in mine]]
            columns = []
            for z in twins:
                centred = [_deviations([row[j] for row in z]) for j in range(width)]
                columns.append([[x / (mean([y * y for y in c]) + 1e-5).sqrt() for x in c] for c in centred])
            off = []
            for j, a in enumerate(columns[0]):
                for k, b in enumerate(columns[1]):
                    c = mean([x * y for x, y in zip(a, b, strict=True)])
                    off.append((1 - c) ** 2 if j == k else redundancy * c**2)
            summed.append(len(mine) * total(off))
            rows += len(mine)
    return total(summed) / max(rows, 1)


REFERENCES: dict[str, Callable[..., Number]] = {
    "infonce": infonce,
    "quickthoughts": quickthoughts,
    "supcon": supcon,
    "siglip": siglip,
    "dcl": dcl,
    "hcl": hcl,
    "align_uniform": align_uniform,
    "cacr": cacr,
    "tuple": tuple_loss,
    "cross_entropy": cross_entropy,
    "triplet": triplet,
    "blocks": blocks,
    "co2": co2,
    "swav": swav,
    "regression": regression,
    "vicreg": vicreg,
    "barlow_twins": barlow_twins,
    "dp": distance_polarization,
    "cllr": low_dimensional_reconstruction,
}
