"""Every objective again, as float64 loops written from its formula. The conformance checks compare with them.

Nothing here is fast or numerically stable, and no code is shared with the implementations. Each function names its
equation and source. Sums run over indices, exponentials are not shifted, and logarithms come last.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from dipole.core.conformance.case import (
    Case,
    Number,
    Temperature,
    Vector,
    cosine,
    dot,
    dots,
    log_softmax,
    mean,
    norm,
    ramp,
    similarity_of,
    squared_distance,
    squared_distances,
    tau_of,
    total,
    unit,
)
from dipole.core.conformance.reference_no_negatives import (
    barlow_twins,
    distance_polarization,
    low_dimensional_reconstruction,
    regression,
    singular_values,
    sinkhorn,
    swav,
    vicreg,
)

__all__ = [
    "REFERENCES", "Case", "Number", "Temperature", "Vector", "cosine", "dot", "log_softmax", "mean", "norm",
    "similarity_of", "singular_values", "sinkhorn", "squared_distance", "tau_of", "total", "unit",
]  # fmt: skip


def infonce(
    case: Case, *, temperature: Temperature, similarity: str = "cosine", joint: bool = False, init: float | None = None
) -> Number:
    """LMCL Eq. 1 and CACR Eq. 1. joint is the cross-entropy of one softmax against equal positives."""
    s, tau = similarity_of(case, similarity), tau_of(case, temperature)
    losses = []
    for i in case.counted():
        others = case.negatives(i)
        negatives = (s(i, others) / tau).exp().sum()
        positives = (s(i, case.positives[i]) / tau).exp()
        if not others:
            losses.append(total([]))
        elif joint:
            losses.append(-mean((positives / (positives.sum() + negatives)).log()))
        else:
            losses.append(-mean((positives / (positives + negatives)).log()))
    return mean(losses)


def supcon(
    case: Case, *, temperature: Temperature, variant: str = "out", similarity: str = "cosine", init: float | None = None
) -> Number:
    """Khosla et al. 2020, Eqs. 2 and 3: positives are all of the class where labels are known, else those given."""
    s, tau = similarity_of(case, similarity), tau_of(case, temperature)
    losses = []
    for i in range(len(case.anchors)):
        positives = case.positives[i]
        if case.labels is not None and case.labels[i] >= 0:
            positives = _same_class(case, i)
        if not positives:
            continue
        negatives = [j for j in case.all_but(positives, i) if j >= case.first_negative]
        shares = (s(i, positives) / tau).exp()
        whole = shares.sum() + (s(i, negatives) / tau).exp().sum()
        losses.append(-mean(shares).div(whole).log() if variant == "in" else -mean((shares / whole).log()))
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
        pairs = (1.0, case.positives[i]), (-1.0, case.negatives(i))
        losses.append(total((1 + (-z * (s(i, of) / tau + b)).exp()).log().sum() for z, of in pairs))
    return mean(losses)


def cross_entropy(case: Case, *, classes: int) -> Number:
    """-log of the true class's share of sum_c e^{a_i . w_c}, the class vectors w being parameters["vectors"]."""
    assert case.labels is not None
    assert len(case.parameters["vectors"]) == classes
    losses = []
    for anchor, label in zip(case.anchors, case.labels, strict=True):
        shares = dots(anchor, case.parameters["vectors"]).exp()
        losses.append(-(shares[label] / shares.sum()).log())
    return mean(losses)


def tuple_loss(case: Case, *, temperature: Temperature, init: float | None = None) -> Number:
    """LMCL Eq. 2: InfoNCE whose positives share the label."""
    same = [_same_class(case, i) for i in range(len(case.anchors))]
    return infonce(replace(case, positives=same), temperature=temperature)


def _same_class(case: Case, i: int) -> list[int]:
    """The candidates of an anchor's class that it does not ignore."""
    assert case.labels is not None
    assert case.candidate_labels is not None
    return [j for j, y in enumerate(case.candidate_labels) if y == case.labels[i] and j not in case.ignored[i]]


def hcl(
    case: Case,
    *,
    temperature: Temperature,
    rho: float,
    beta: float = 0.0,
    similarity: str = "cosine",
    init: float | None = None,
) -> Number:
    """Robinson et al. 2021: -log(e^+ / (e^+ + G)), G debiased by the class prior rho, of weights e^{beta s / tau}.

    Without weights (beta = 0) it is DCL of Chuang et al. 2020.
    """
    s, tau = similarity_of(case, similarity), tau_of(case, temperature)
    losses = []
    for i in case.counted():
        negatives = case.negatives(i)
        count = len(negatives)
        if not count:
            losses.append(total([]))
            continue
        scores = s(i, negatives)
        lowest = -1.0 if similarity == "cosine" else min(scores.tolist())
        floor = count * (torch.tensor(lowest, dtype=torch.float64) / tau).exp()
        raw = (beta * scores / tau).exp()
        weighted = total(raw / mean(raw) * (scores / tau).exp())
        positives = (s(i, case.positives[i]) / tau).exp()
        debiased = [max((weighted - rho * count * e) / (1 - rho), floor) for e in positives]
        losses.append(mean([-(e / (e + g)).log() for e, g in zip(positives, debiased, strict=True)]))
    return mean(losses)


def align_uniform(
    case: Case, *, alpha: float, t: float, align_weight: float, uniform_weight: float, uniform_over: str = "views"
) -> Number:
    """Wang & Isola 2020: E ||a - p||^alpha and log E e^{-t ||z_i - z_j||^2} over pairs of different instances.

    Of two encoders each has its uniformity, and their mean counts. Where a queue belongs to the anchors' encoder, they
    alone have one. uniform_over=views: each view of an encoder has its own.
    """
    case, aligned = case.on_sphere(), []
    for i in range(len(case.anchors)):
        d_pos = squared_distances(case.anchors[i], [case.candidates[p] for p in case.positives[i]])
        if len(d_pos):
            aligned.append(mean(d_pos.pow(alpha / 2)))
    sides = []
    for pairs in _within_views(case) if uniform_over == "views" else _within_sides(case):
        if pairs:
            first, second = (torch.stack(each) for each in zip(*pairs, strict=True))
            sides.append(mean((-t * (2 - 2 * (first * second).sum(1))).exp()).log())
    return align_weight * mean(aligned) + uniform_weight * mean(sides)


def _within_views(case: Case) -> list[list[tuple[Vector, Vector]]]:
    """Ordered pairs of different instances, for each view of each encoder, if an instance has several."""
    a, c = case.anchors, case.candidates
    if case.view_pairs:
        rows = [
            [j for j, own in enumerate(case.candidate_views) if own == v] for v in sorted(set(case.candidate_views))
        ]
        return [[(c[i], c[j]) for i in of for j in of if i != j] for of in rows]
    if case.side or not case.views or len(set(case.anchor_views)) == 1:
        sides = _within_sides(case)
        keys = sorted({case.candidate_views[j] for j in case.others})
        if len(sides) < 2 or len(keys) < 2:
            return sides
        view_of = {id(c[j]): case.candidate_views[j] for j in case.others}
        split = [[(x, y) for x, y in sides[1] if view_of[id(x)] == v == view_of.get(id(y), v)] for v in keys]
        return [sides[0], *split]
    found, of = [], case.candidate_instances or []
    gone = [{(case.candidate_views[j], of[j]) for j in ignored} for ignored in case.ignored]
    for view in dict.fromkeys(case.anchor_views):
        mine = [i for i, own in enumerate(case.anchor_views) if own == view]
        pairs = [(a[i], a[j]) for i in mine for j in mine if i != j and (view, case.instances[j]) not in gone[i]]
        found.append(pairs + [(a[i], c[j]) for i in mine for j in case.queue if j not in case.ignored[i]])
    return found


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
        if of is None or of[j] not in case.instances:
            return None
        return case.instances.index(of[j])

    queries, keys = [], []
    of_queries, of_keys = ([], case.queue) if case.queue_of_keys else (case.queue, [])
    for i in range(len(a)):
        doubles = {owner(j) for j in case.ignored[i] if j in case.others} - {None}
        queries += [(a[i], a[k]) for k in range(len(a)) if k != i and k not in doubles]
        queries += [(a[i], c[j]) for j in of_queries if j not in case.ignored[i]]
    for j in case.others:
        mine = owner(j)
        doubles = set() if mine is None or not case.views else set(case.ignored[mine])
        keys += [
            (c[j], c[m]) for m in case.others if m != j and (mine is None or owner(m) != mine) and m not in doubles
        ]
        keys += [(c[j], c[m]) for m in of_keys if m not in doubles]
    if of_queries:
        return [queries]
    return [queries, keys]


def _conditional(distances: Vector, temperature: float, kind: str, contrastive_sign: float) -> Vector:
    """Weights of CACR Eqs. 3-4: e^{sign t d2}, normalised. reversed flips the sign, uniform drops the distances."""
    sign = {"contrastive": contrastive_sign, "reversed": -contrastive_sign, "uniform": 0.0}[kind]
    raw = (sign * temperature * distances).exp()
    return raw / raw.sum()


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
    """CACR Eqs. 2-5. rbf is the cost of Eq. 13 and, for the repulsion, the logarithm of Eq. 14.

    rbf_repulsion has that cost for the repulsion alone, and a logarithm for each pair of views.

    `intra_batch` adds the anchors of other instances, where they are no candidates yet (App. C.2). `detach_weights` is
    the no_grad of Algorithm 3. Between pairs of views every row of every view attracts.
    """

    def point_cost(d: Vector) -> Vector:
        if cost != "euclidean":
            return -((-rbf_t * d).exp())
        return d

    case, attraction, repulsion = case.on_sphere(), [], []
    attracted = [(case.anchors[i], case.positives[i]) for i in case.counted()]
    if case.view_pairs:
        total_rows = len(case.candidates)
        batch = total_rows // len(set(case.candidate_views))
        steps = range(batch, total_rows, batch)
        attracted = [(c, [(j + step) % total_rows for step in steps]) for j, c in enumerate(case.candidates)]
    for a, positives in attracted:
        d_pos = squared_distances(a, [case.candidates[p] for p in positives[:k]])
        pull = _conditional(d_pos, t_pos, positive_weights, +1.0)
        if detach_weights:
            pull = pull.detach()
        attraction.append(total(pull * (point_cost(d_pos) if cost == "rbf" else d_pos)))
    for i in case.counted():
        a = case.anchors[i]
        others = [case.candidates[j] for j in case.negatives(i)]
        if intra_batch and case.view_pairs:
            own, of = case.anchor_views[i], case.candidate_instances or []
            mine = [j for j, view in enumerate(case.candidate_views) if view == own]
            others += [case.candidates[j] for j in mine if of[j] != case.instances[i]]
        elif intra_batch:
            fresh = range(case.side or case.among, len(case.anchors))
            if i < case.side:
                fresh = range(case.side)
            others += [case.anchors[m] for m in fresh if case.instances[m] != case.instances[i]]
        d_neg = squared_distances(a, others)
        push = _conditional(d_neg, t_neg, negative_weights, -1.0)
        if others or cost == "euclidean":
            repulsion.append(-total(push * point_cost(d_neg)))
    if cost == "rbf_repulsion" and case.view_pairs and repulsion:
        runs = [case.anchor_runs[i] for i in case.counted()]
        of_runs = [mean([r for r, run in zip(repulsion, runs, strict=True) if run == each]) for each in set(runs)]
        return mean(attraction) + mean([each.log() for each in of_runs])
    if cost != "euclidean":
        potential = mean(repulsion)
        return mean(attraction) + (potential.log() if repulsion else total([]))
    return mean(attraction) + mean(repulsion)


def triplet(case: Case, *, margin: float, mode: str) -> Number:
    """CACR App. B.5: [cost of the positives - cost of the negatives + margin]_+, expected or hardest."""
    case, losses = case.on_sphere(), []
    for i in case.counted():
        pos, neg = (
            squared_distances(case.anchors[i], [case.candidates[j] for j in each])
            for each in (case.positives[i], case.negatives(i))
        )
        if not len(neg):
            losses.append(total([]))
            continue
        gap = max(pos) - min(neg) + margin if mode == "hardest" else mean(pos) - mean(neg) + margin
        losses.append(ramp(gap))
    return mean(losses)


def blocks(case: Case, *, b: int | None = None, k: int | None = None, loss: str = "logistic") -> Number:
    """Arora et al. Eq. 12 (b = 1: Eqs. 4-6): v_m = a . (mu_i - mu_m), logistic in base 2 or hinge.

    mu_i averages the block of anchor i, its first b positives. Of blocks, mu_m averages those of the first point of
    block m, for the k blocks that `block_draw` draws for each anchor, or for all others.
    Elsewhere the block of anchor m is a negative of i if all of its points are negatives of i, and k takes the next k
    such blocks in cyclic order.
    """

    losses = []
    anchors = case.counted()
    mu = {i: torch.stack([case.candidates[p] for p in case.positives[i][:b]]).mean(0) for i in anchors}
    for i in anchors:
        if case.of_block:
            count = len(case.anchors) // case.of_block
            if k is None:
                others = [m for m in range(count) if m != i // case.of_block]
            else:
                others = block_draw(case.draw, i, case.of_block, count, k)
            foreign = [m * case.of_block for m in others]
        else:
            negatives = set(case.negatives(i))
            cyclic = [m for m in anchors if m > i] + [m for m in anchors if m < i]
            foreign = [m for m in cyclic if negatives >= set(case.positives[m][:b])][:k]
        v = dots(case.anchors[i], [mu[i] - mu[m] for m in foreign])
        if not foreign:
            losses.append(total([]))
        elif loss == "logistic":
            losses.append((1 + total((-v).exp())).log() / torch.tensor(2.0, dtype=torch.float64).log())
        else:
            losses.append(ramp(max(1 - x for x in v)))
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
    rows = case.on_sphere().candidates if similarity == "cosine" else case.candidates
    divergences = []
    for i in case.counted():
        negatives = case.negatives(i)
        if not negatives:
            divergences.append(total([]))
            continue
        log_p = log_softmax(s(i, negatives), tau)
        log_q = log_softmax(dots(rows[case.positives[i][0]], [rows[j] for j in negatives]), tau)
        forward = total(log_p.exp() * (log_p - log_q))
        backward = total(log_q.exp() * (log_q - log_p))
        divergences.append((forward + backward) / 2)
    base = infonce(case, temperature=temperature, similarity=similarity)
    return base + weight * mean(divergences)


REFERENCES: dict[str, Callable[..., Number]] = {
    "infonce": infonce, "quickthoughts": partial(infonce, joint=True), "supcon": supcon, "siglip": siglip, "dcl": hcl,
    "hcl": hcl, "align_uniform": align_uniform, "cacr": cacr, "tuple": tuple_loss, "cross_entropy": cross_entropy,
    "triplet": triplet, "blocks": blocks, "co2": co2, "swav": swav, "regression": regression, "vicreg": vicreg,
    "barlow_twins": barlow_twins, "dp": distance_polarization, "cllr": low_dimensional_reconstruction,
}  # fmt: skip
