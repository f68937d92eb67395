"""Weights of rows, (A,), and of pairs, (A, K): values against float64 loops, refusals, caching and changed copies."""

import pytest
import torch
from torch import Tensor, nn

import dipole
from dipole import AnyStatistic, Composite, LogSumExp, Objective, Pairs, PairsError, Rows
from dipole.core.objectives import similarity, tiles
from dipole.core.objectives.registry import registry

NAMES = [entry.name for entry in registry.entries() if entry.kind != "diagnostic"]
PER_PAIR = {"infonce", "quickthoughts", "dcl", "hcl", "regression", "swav"}
NO_MEAN = {"align_uniform", "barlow_twins", "vicreg"}
B = 6


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


def some_weights(*shape: int) -> Tensor:
    return draw(*shape, seed=9).abs() * (draw(*shape, seed=8) > -1)  # some are 0


def layouts(z: Tensor) -> dict[str, Pairs]:
    """Pairs with weights, by the name of the layout. z is (3, B, 4)."""
    a, b, c = z
    two, three = [a, b], [a, b, c]
    of_rows, of_pairs, alone = some_weights(B), some_weights(B, 2), some_weights(B, 1)
    own = torch.arange(B).unsqueeze(1)
    listed = torch.tensor([[-1, 0], [1, -1], [2, 3], [-1, -1], [4, 5], [5, -1]])
    return {
        "rows of views": Pairs.from_views(three, weights=of_rows),
        "anchors of views": Pairs.from_views(two, weights=some_weights(2 * B)),
        "pairs of two views": Pairs.from_views(two, weights=alone),
        "pairs of three views": Pairs.from_views(three, weights=some_weights(3 * B, 2)),
        "queries": Pairs.from_views(three, negatives="queries", weights=of_pairs),
        "keys and queue": Pairs.cross(a, torch.stack([b, c], 1), draw(3, 4), True, weights=of_pairs),
        "sides": Pairs.both(a, b, weights=of_rows),
        "pairs of sides": Pairs.both(a, b, weights=some_weights(2 * B, 1)),
        "columns": Pairs.from_columns(a, b, c, weights=alone),
        "crops": Pairs.from_crops(two, [c], weights=some_weights(3 * B, 2)),
        "labels": Pairs.from_labels(a, torch.tensor([0, 0, 0, 1, 1, 2]), weights=of_rows),
        "window": Pairs.from_window(a, b, torch.tensor([0, 0, 0, 1, 1, 1]), weights=of_rows),
        "blocks": Pairs.from_blocks(z.transpose(0, 1), "all", weights=of_pairs),
        "own indices": Pairs(a, b, listed, own[:, :0], weights=of_pairs),
    }


def by_loops(pairs: Pairs, temperature: float, joint: bool) -> Tensor:
    """sum w L / sum w over rows or over pairs, from the formula of InfoNCE."""
    s = nn.functional.normalize(pairs.anchors) @ nn.functional.normalize(pairs.candidates).T / temperature
    assert pairs.weights is not None
    top = bottom = torch.zeros((), dtype=torch.double)
    for i in range(len(s)):
        positives = [int(p) for p in pairs.positives[i] if p >= 0]
        out = {*positives, *pairs.ignored[i].tolist()}
        negatives = sum(s[i, j].exp() for j in range(pairs.first_negative, s.shape[1]) if j not in out)
        losses = []
        for p in positives:
            against = sum(s[i, q].exp() for q in positives) if joint else s[i, p].exp()
            losses.append((against + negatives).log() - s[i, p])
        if not positives:
            continue
        if pairs.weights.ndim == 1:
            top, bottom = top + pairs.weights[i] * sum(losses) / len(losses), bottom + pairs.weights[i]
            continue
        for weight, loss in zip(pairs.weights[i], losses, strict=False):
            top, bottom = top + weight * loss, bottom + weight
    return top / bottom


@pytest.mark.parametrize(("way", "joint"), [("dense", False), ("tiles", True)])
@pytest.mark.parametrize("name", layouts(draw(3, B, 4)))
def test_infonce_is_a_weighted_mean(name, way, joint, monkeypatch):
    if way == "tiles":
        monkeypatch.setattr(similarity, "LARGEST", 0)
        monkeypatch.setattr(tiles, "TILE", 4)
    z = draw(3, B, 4).requires_grad_()
    pairs = layouts(z)[name]
    text = f"infonce(temperature=0.5, joint={str(joint).lower()})"
    found, wanted = dipole.objective(text)(pairs).loss, by_loops(pairs, 0.5, joint)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=0)
    grads = [torch.autograd.grad(each, z)[0] for each in (found, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-12)


def test_weights_of_an_instance_go_to_its_anchors():
    z = draw(3, B, 4)
    w, of_pairs = some_weights(B), some_weights(B, 2)
    assert torch.equal(layouts(z)["rows of views"].weights, w.repeat(3))
    assert torch.equal(layouts(z)["pairs of three views"].weights, some_weights(3 * B, 2))
    assert torch.equal(layouts(z)["blocks"].weights, of_pairs.repeat_interleave(3, 0))
    assert torch.equal(Pairs.both(z[0], z[1], weights=w).weights, w.repeat(2))
    # Padding moves behind the real positives, and the weights with it.
    pairs = layouts(z)["own indices"]
    assert (pairs.positives[0].tolist(), pairs.weights[0, 0]) == ([0, -1], of_pairs[0, 1])
    halves = Pairs.cross(z[0].half(), z[1].half(), weights=w > 0)
    assert halves.weights.dtype == torch.float32
    assert Pairs.cross(z[0], z[1], weights=torch.ones(B, dtype=torch.long)).weights.dtype == torch.double


def repeated(weights: Tensor) -> tuple[Pairs, Pairs]:
    """Pairs with whole weights of rows, and pairs whose anchors occur as often instead."""
    a, c = draw(B, 4, seed=1), draw(9, 4, seed=2)
    positives = torch.arange(B).unsqueeze(1) + torch.tensor([0, 1])
    ignored, labels = positives[:, :0], torch.arange(B) % 3
    more = {"candidate_labels": torch.arange(9) % 3}
    often = torch.arange(B).repeat_interleave(weights)
    return (
        Pairs(a, c, positives, ignored, labels, weights=weights, **more),
        Pairs(a[often], c, positives[often], ignored[often], labels[often], **more),
    )


@pytest.mark.parametrize(
    "name", [*sorted(set(NAMES) - NO_MEAN - {"blocks"}), "dp(reduction=mean)", "dp(reduction=sum)"]
)
def test_a_weight_of_two_is_an_anchor_that_occurs_twice(name):
    """In `blocks` the anchors define the negatives, so one that occurs twice is another batch."""
    counts = torch.tensor([2, 1, 0, 3, 1, 2])
    weighed, often = repeated(counts)
    torch.manual_seed(0)
    term = dipole.objective(name, dim=4).double()
    for parameter in term.parameters():
        nn.init.normal_(parameter)
    torch.testing.assert_close(term(weighed).loss, term(often).loss, rtol=1e-11, atol=1e-12)
    if name != "dp(reduction=sum)":  # only ratios matter
        torch.testing.assert_close(term(repeated(3 * counts)[0]).loss, term(weighed).loss)


@pytest.mark.parametrize("name", NAMES)
def test_a_term_that_cannot_use_weights_says_so(name):
    z, labels = list(draw(3, B, 4)), torch.arange(B) % 3
    term = dipole.objective(f"infonce + {name}", dim=4).double()
    for weights, fine in ((some_weights(B), name not in NO_MEAN), (some_weights(B, 2), name in PER_PAIR)):
        pairs = Pairs.from_views(z, labels, weights=weights)
        if fine:
            assert term(pairs).loss.isfinite()
            continue
        with pytest.raises(PairsError, match=rf"^{name} cannot use weights"):
            term(pairs)


def test_weights_of_zero_alone_give_zero():
    z = draw(2, B, 4).requires_grad_()
    for weights in (torch.zeros(B), torch.zeros(B, 1)):
        loss = dipole.objective("infonce(joint=true)")(Pairs.from_views(list(z), weights=weights)).loss
        assert loss == 0
        assert torch.autograd.grad(loss, z)[0].abs().max() == 0


def queries(weights: Tensor) -> Pairs:
    return Pairs.cross(draw(B, 4), draw(B, 2, 4), weights=weights)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: queries(torch.ones(5)), r"weights must be .*\(A,\) = \(6,\) or \(A, K\) = \(6, 2\), got \(5,\)"),
        (lambda: queries(torch.ones(6, 3)), r"got \(6, 3\)"),
        (lambda: queries([1.0] * 6), "got list"),
        (lambda: queries(-torch.ones(6)), "finite and >= 0, got -1"),
        (lambda: queries(torch.full((6, 2), torch.nan)), "finite and >= 0, got nan"),
        (lambda: queries(torch.full((6,), torch.inf)), "finite and >= 0, got inf"),
        (lambda: Pairs.from_views(list(draw(2, B, 4)), weights=torch.ones(B, 2)), r"\(B, K\) = \(6, 1\)"),
        (lambda: Pairs.from_labels(draw(B, 4), torch.arange(B) % 3, weights=torch.ones(B, 1)), r"= \(6,\), got"),
        (lambda: layouts(draw(3, B, 4))["queries"].with_positives(torch.zeros(B, 1).long()), "old positives"),
        (
            lambda: Pairs(*draw(2, B, 4), torch.zeros(B, 1).long(), torch.zeros(B, 0).long(), weights=-torch.ones(B)),
            "finite and >= 0",
        ),
    ],
)
def test_wrong_weights_give_one_error(make, words):
    with pytest.raises(PairsError, match=words) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("shape", [(8,), (8, 1)])
def test_cached_encoders_keep_the_weights(shape):
    torch.manual_seed(0)
    encoder, views, weights = nn.Linear(4, 3).double(), draw(2, 8, 4), some_weights(*shape)

    def related(a: Tensor, b: Tensor, weights: Tensor) -> Pairs:
        return Pairs.from_views([a, b], weights=weights)

    step = dipole.cached(encoder, "infonce", microbatch=3, pairs=related)
    loss = step(*views, weights=weights)
    wanted = dipole.objective("infonce")(related(*map(encoder, views), weights)).loss
    torch.testing.assert_close(loss, wanted)
    grads = [torch.autograd.grad(each, encoder.weight)[0] for each in (loss, wanted)]
    torch.testing.assert_close(*grads)


class SoftTargets(Objective):
    """Cross entropy of soft targets over the positives, which it reads itself."""

    weighting = "own"

    def __init__(self) -> None:
        super().__init__("cosine")

    def statistics(self) -> dict[str, AnyStatistic]:
        return {"negatives": LogSumExp(2.0)}

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        target = rows.pairs.weights
        assert target is not None
        logits = torch.cat([2 * positive, rows.negatives.unsqueeze(1)], 1)
        return -(target * logits.log_softmax(1)[:, :-1]).sum(1)  # not divided by the sum of targets


class LosesThem(SoftTargets):
    weighting = None

    def prepare(self, pairs: Pairs) -> Pairs:
        return Pairs(pairs.anchors, pairs.candidates, pairs.positives, pairs.ignored)


def test_a_term_of_your_own_reads_the_weights():
    z, target = draw(3, B, 4), some_weights(B, 2)
    pairs = Pairs.cross(z[0], z[1:].transpose(0, 1), weights=target)
    unit = nn.functional.normalize(z, dim=2)
    wanted = []
    for i in range(B):
        scores = [2 * unit[0, i] @ unit[k, j] for k in (1, 2) for j in range(B)]
        base = torch.stack(scores).logsumexp(0)
        wanted.append(sum(target[i, k] * (base - 2 * unit[0, i] @ unit[k + 1, i]) for k in (0, 1)))
    torch.testing.assert_close(Composite([SoftTargets()], [1.0])(pairs).loss, torch.stack(wanted).mean())
    rows = Pairs.cross(z[0], z[1], weights=some_weights(B))
    with pytest.raises(PairsError, match="LosesThem cannot use weights: its own pairs have none"):
        Composite([LosesThem()], [1.0])(rows)


def test_changed_copies_keep_their_weights():
    z = draw(3, B, 4)
    pairs = layouts(z)["queries"]
    assert torch.equal(pairs.first_positives(1).weights, pairs.weights[:, :1])
    assert torch.equal(pairs.with_intra_batch().weights, pairs.weights)
    assert torch.equal(pairs.narrow(slice(2, 4), B).weights, pairs.weights[2:4])
    of_views = layouts(z)["rows of views"]
    assert torch.equal(of_views.narrow(slice(2, 4), B).weights, some_weights(B)[2:4].repeat(3))
    first, second = Pairs.both(z[0], z[1], weights=some_weights(B)).within_sides()
    assert torch.equal(first.weights, second.weights)
