"""Limits between objectives: where one becomes another, they agree in value and gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dipole
from dipole.core.conformance.reference import Case, uaur
from dipole.core.evaluation.diagnostics import alignment, uniformity
from dipole.core.objectives import similarity, tiles
from dipole.core.objectives.pairs import Pairs

SIZES = st.tuples(st.integers(2, 6), st.integers(2, 4), st.integers(2, 5), st.integers(0, 10_000))
quick = settings(max_examples=15, deadline=None)


def embeddings(batch: int, views: int, dim: int, seed: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, dim, generator=source, dtype=torch.float64).requires_grad_() for _ in range(views)]


def evaluate(spec: str, leaves: list[Tensor], pairs: Pairs) -> tuple[Tensor, list[Tensor]]:
    loss = dipole.objective(spec, dim=leaves[0].shape[-1]).double()(pairs).loss
    return loss.detach(), list(torch.autograd.grad(loss, leaves))


def agree(one: str, other: str, leaves: list[Tensor], pairs: Pairs, factor: float = 1.0, atol: float = 1e-10) -> None:
    (a, da), (b, db) = evaluate(one, leaves, pairs), evaluate(other, leaves, pairs)
    torch.testing.assert_close(a, factor * b, atol=atol, rtol=1e-10)
    for x, y in zip(da, db, strict=True):
        torch.testing.assert_close(x, factor * y, atol=atol, rtol=1e-9)


SIMILARITIES = st.sampled_from(["cosine", "dot", "bilinear"])


@quick
@given(SIZES, st.floats(0.0, 0.5), SIMILARITIES)
def test_hcl_without_concentration_is_dcl(sizes, rho, similarity):
    leaves = embeddings(*sizes)
    options = f"rho={rho:.3f}, temperature=0.5, similarity={similarity}"
    agree(f"hcl(beta=0, {options})", f"dcl({options})", leaves, Pairs.from_views(leaves))


@quick
@given(SIZES, SIMILARITIES)
def test_dcl_without_prior_is_infonce(sizes, similarity):
    leaves = embeddings(*sizes)
    pairs = Pairs.from_views(leaves)
    agree(f"dcl(rho=0, similarity={similarity})", f"infonce(similarity={similarity})", leaves, pairs)
    agree(f"hcl(rho=0, beta=0, similarity={similarity})", f"infonce(similarity={similarity})", leaves, pairs)


def test_dcl_without_prior_is_infonce_also_at_its_floor():
    queries, keys, queue = (x[:1] for x in embeddings(1, 3, 4, 0))
    leaves = [queries, keys, queue]
    agree("dcl(rho=0, similarity=dot)", "infonce(similarity=dot)", leaves, Pairs.cross(queries, keys, queue))


@quick
@given(SIZES)
def test_hcl_tends_to_dcl(sizes):
    leaves = embeddings(*sizes)
    agree("hcl(beta=1e-9)", "dcl", leaves, Pairs.from_views(leaves), atol=1e-6)


@quick
@given(SIZES)
def test_cacr_with_uniform_weights_is_uaur(sizes):
    leaves = embeddings(*sizes)
    pairs = Pairs.from_views(leaves)
    value, gradients = evaluate("cacr(positive_weights=uniform, negative_weights=uniform)", leaves, pairs)
    true = uaur(Case.of(pairs))
    torch.testing.assert_close(value, true.detach(), atol=1e-10, rtol=0)
    for x, y in zip(gradients, torch.autograd.grad(true, leaves), strict=True):
        torch.testing.assert_close(x, y, atol=1e-10, rtol=0)
    agree("cacr(t_pos=0, t_neg=0)", "cacr(positive_weights=uniform, negative_weights=uniform)", leaves, pairs)


@quick
@given(SIZES)
def test_uaur_is_the_uniform_triplet(sizes):
    leaves = embeddings(*sizes)
    pairs = Pairs.from_views(leaves)
    # A margin of 4, the largest squared distance, keeps the hinge open.
    triplet, gradients = evaluate("triplet(margin=4.0)", leaves, pairs)
    uniform, expected = evaluate("cacr(positive_weights=uniform, negative_weights=uniform)", leaves, pairs)
    torch.testing.assert_close(triplet, uniform + 4)
    torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("tile", [512, 5])
def test_sharp_cacr_tends_to_the_hardest_triplet(tile, monkeypatch):
    monkeypatch.setattr(tiles, "TILE", tile)
    if tile == 5:
        monkeypatch.setattr(similarity, "LARGEST", 0)
    leaves = embeddings(6, 3, 8, 1)
    pairs = Pairs.from_views(leaves)
    hardest, expected = evaluate("triplet(margin=4.0, mode=hardest)", leaves, pairs)
    distances = []
    for sharpness in (3, 30, 300, 3000):
        value, gradients = evaluate(f"cacr(t_pos={sharpness}, t_neg={sharpness})", leaves, pairs)
        distances.append(float(abs(value + 4 - hardest)))
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 0.1
    assert distances[-1] < 1e-9
    torch.testing.assert_close(gradients, expected, atol=1e-8, rtol=0)


@quick
@given(SIZES, st.sampled_from(["logistic", "hinge"]))
def test_single_point_blocks_are_l_un(sizes, loss):
    # L_un (Arora Eqs. 4-6) over all other blocks: l of f(x)^T ( f(x+) - f(x_m^-) ).
    n, _, dim, seed = sizes
    (x,) = embeddings(n * 3, 1, dim, seed)
    blocks = x.view(n, 3, dim)
    value, gradients = evaluate(f"blocks(b=1, loss={loss})", [x], Pairs.from_blocks(blocks))
    total = 0.0 * x.sum()  # where every hinge is inactive the gradient is 0, not missing
    for i in range(n):
        v = [blocks[i, 0] @ (blocks[i, 1] - blocks[m, 1]) for m in range(n) if m != i]
        if loss == "logistic":
            total = total + torch.log2(1 + sum((-one).exp() for one in v)) / n
        else:
            total = total + max(torch.zeros_like(v[0]), 1 - min(v)) / n
    torch.testing.assert_close(value, total.detach())
    torch.testing.assert_close(gradients, list(torch.autograd.grad(total, [x])))


@quick
@given(SIZES)
def test_single_point_logistic_blocks_are_infonce_in_bits(sizes):
    n, _, dim, seed = sizes
    queries, keys = embeddings(n, 2, dim, seed)
    pairs = Pairs.cross(queries, keys)
    factor = 1 / torch.log(torch.tensor(2.0, dtype=torch.float64))
    agree("blocks", "infonce(similarity=dot, temperature=1.0)", [queries, keys], pairs, factor=factor)


@quick
@given(SIZES)
def test_infonce_with_several_positives_is_their_mean(sizes):
    leaves = embeddings(*sizes)
    pairs = Pairs.from_views(leaves)
    value, gradients = evaluate("infonce", leaves, pairs)
    count = pairs.positives.shape[1]
    total = torch.zeros((), dtype=torch.float64)
    for k in range(count):
        others = torch.cat([pairs.positives[:, :k], pairs.positives[:, k + 1 :]], 1)
        one = Pairs(
            pairs.anchors, pairs.candidates, pairs.positives[:, k : k + 1], torch.cat([pairs.ignored, others], 1)
        )
        total = total + dipole.objective("infonce")(one).loss / count
    torch.testing.assert_close(value, total.detach())
    torch.testing.assert_close(gradients, list(torch.autograd.grad(total, leaves)))


def test_joint_and_separate_softmax_agree_for_one_positive_only():
    two, three = embeddings(5, 2, 4, 0), embeddings(5, 3, 4, 0)
    agree("infonce(joint=true)", "infonce", two, Pairs.from_views(two))
    joint, _ = evaluate("infonce(joint=true)", three, Pairs.from_views(three))
    separate, _ = evaluate("infonce", three, Pairs.from_views(three))
    assert abs(joint - separate) > 0.1


def test_objectives_with_one_option_are_others():
    f, g = embeddings(6, 2, 4, 0)
    pairs = Pairs.from_window(f, g, torch.tensor([0, 0, 0, 1, 1, 1]))
    agree("quickthoughts", "infonce(similarity=dot, temperature=1.0, joint=true)", [f, g], pairs)
    leaves = embeddings(5, 3, 4, 0)
    agree("tuple", "infonce", leaves, Pairs.from_views(leaves, torch.arange(5)))
    leaves = embeddings(4, 2, 5, 0)
    agree("infonce(similarity=bilinear)", "infonce(similarity=dot)", leaves, Pairs.from_views(leaves))
    leaves = embeddings(4, 3, 5, 0)
    agree("co2(weight=0)", "infonce", leaves, Pairs.from_views(leaves))
    leaves = embeddings(5, 3, 4, 0)
    agree("align_uniform(uniform_weight=0)", "regression", leaves, Pairs.from_views(leaves))
    leaves = embeddings(5, 2, 4, 0)
    value, _ = evaluate("vicreg(variance=0, covariance=0)", leaves, Pairs.from_views(leaves))
    torch.testing.assert_close(value, 25 / 4 * (leaves[0] - leaves[1]).detach().square().sum(1).mean())


def test_tuple_takes_positives_from_labels():
    (x,) = embeddings(6, 1, 4, 0)
    labels = torch.tensor([0, 1, 0, 1, 1, 2])
    pairs = Pairs.from_views([x, x + 0.1], labels)
    z = torch.nn.functional.normalize(pairs.anchors, dim=1)
    s = (z @ z.T / 0.5).exp()
    y = labels.repeat(2)
    rows = []
    for i in range(12):
        negatives = sum(s[i, j] for j in range(12) if y[j] != y[i])
        positives = [p for p in range(12) if p != i and y[p] == y[i]]
        rows.append(sum(-(s[i, p] / (s[i, p] + negatives)).log() for p in positives) / len(positives))
    torch.testing.assert_close(evaluate("tuple", [x], pairs)[0], (sum(rows) / 12).detach())


def test_cacr_first_of_several_positives():
    leaves = embeddings(4, 3, 5, 0)
    pairs = Pairs.from_views(leaves)
    own = torch.arange(12).unsqueeze(1)
    first = Pairs(pairs.anchors, pairs.candidates, (own + 4) % 12, torch.cat([own, (own + 8) % 12], 1))
    one, other = evaluate("cacr(k=1)", leaves, pairs), evaluate("cacr", leaves, first)
    torch.testing.assert_close(one, other)


def test_rbf_repulsion_with_uniform_weights_is_uniformity():
    leaves = embeddings(5, 2, 4, 0)
    pairs = Pairs.from_views(leaves)
    rbf, _ = evaluate("cacr(cost=rbf, rbf_t=3.0, negative_weights=uniform)", leaves, pairs)
    uniform, _ = evaluate("align_uniform(t=3.0, align_weight=0, uniform_over=pairs)", leaves, pairs)
    distance = 2 - 2 * torch.nn.functional.cosine_similarity(*leaves)
    torch.testing.assert_close(rbf, (uniform - (-3 * distance).exp().mean()).detach(), atol=1e-10, rtol=0)


@pytest.mark.parametrize("reduction", ["anchor_sum", "mean", "sum"])
def test_dp_reductions_are_proportional(reduction):
    leaves = embeddings(6, 2, 4, 0)
    pairs = Pairs.from_views(leaves)  # 12 anchors, 10 others each
    factor = {"anchor_sum": 10.0, "mean": 1.0, "sum": 120.0}[reduction]
    agree(f"0.0*infonce + 1.0*dp(reduction={reduction})", "0.0*infonce + 1.0*dp", leaves, pairs, factor=factor)


@pytest.mark.parametrize("layout", ["views", "cross"])
def test_dp_is_the_mean_over_pairs_of_instances(layout):
    """A float64 loop: with two instances per batch and with ten, the default does not grow with their number."""
    for batch in (2, 10):
        one, other = (leaf.detach() for leaf in embeddings(batch, 2, 4, batch))
        if layout == "views":
            pairs = Pairs.from_views([one, other])
            rows = [(i, x.tolist()) for view in (one, other) for i, x in enumerate(view)]
            couples = [(x, y) for i, x in rows for j, y in rows if i != j]
        else:
            pairs = Pairs.cross(one, other)
            couples = [(x.tolist(), y.tolist()) for i, x in enumerate(one) for j, y in enumerate(other) if i != j]
        penalties = []
        for x, y in couples:
            cosine = sum(a * b for a, b in zip(x, y, strict=True)) / (math.hypot(*x) * math.hypot(*y))
            distance = (1 - cosine) / 2
            penalties.append(abs(min((distance - 0.1) * (distance - 0.5), 0)))
        assert sum(penalties) > 0
        found = dipole.objective("dp")(pairs).terms["dp"].value
        assert float(found) == pytest.approx(math.fsum(penalties) / len(penalties), rel=1e-12)


def test_weights_of_terms_add_up():
    leaves = embeddings(4, 2, 5, 0)
    pairs = Pairs.from_views(leaves)
    (mixed, _), (a, _), (b, _) = (evaluate(s, leaves, pairs) for s in ("0.3*infonce + 2.0*cacr", "infonce", "cacr"))
    torch.testing.assert_close(mixed, 0.3 * a + 2 * b)
    # A regularizer written without a weight takes its paper's.
    agree("infonce + dp", "infonce + 0.1*dp", leaves, pairs)


def in_pairs(f, g):
    """Documents of two sentences each: a sentence has one neighbour."""
    return Pairs.from_window(f, g, torch.arange(len(f)) // 2)


@pytest.mark.parametrize("layout", [in_pairs, Pairs.cross])
def test_two_encoders_do_not_end_at_two_opposite_points(layout):
    """Uniformity is taken within each encoder: all f at one point and all g opposite is not what align_uniform wants.

    Repelling across the two alone, log e^{-2 * 4} + 4 = -4 there is below what any aligned embedding reaches.
    """
    f, g = (z.detach().requires_grad_() for z in embeddings(8, 2, 3, 0))
    point = torch.tensor([[1.0, 0.0, 0.0]], dtype=f.dtype).expand(8, 3)
    term = dipole.objective("align_uniform")
    assert float(term(layout(point, -point)).loss) == pytest.approx(4.0)  # alignment 4, uniformity 0
    optimizer = torch.optim.Adam([f, g], 0.05)
    for _ in range(300):
        optimizer.zero_grad()
        term(layout(f, g)).loss.backward()
        optimizer.step()
    pairs = layout(f.detach(), g.detach())
    assert float(term(pairs).loss) < -1.5
    assert alignment(pairs) < 0.1
    assert uniformity(pairs) < -1.5


def test_siglip_is_binary_and_infonce_is_not():
    # Two instances in two encoders: a positive and a negative for each anchor.
    leaves = embeddings(2, 2, 4, 0)
    pairs = Pairs.cross(*leaves)
    z = torch.nn.functional.normalize(leaves[0], dim=1) @ torch.nn.functional.normalize(leaves[1], dim=1).T / 0.5
    own, other = z.diagonal(), z.flip(1).diagonal()
    binary = ((1 + (-own).exp()).log() + (1 + other.exp()).log()).mean()
    torch.testing.assert_close(evaluate("siglip(temperature=0.5, bias=0)", leaves, pairs)[0], binary.detach())
    torch.testing.assert_close(evaluate("infonce", leaves, pairs)[0], (1 + (other - own).exp()).log().mean().detach())


def test_swav_is_cross_entropy_to_its_codes():
    leaves = embeddings(8, 2, 4, 0)
    term = dipole.objective(
        "swav(prototypes=5, temperature=0.3, epsilon=0.1, iterations=200, codes=all)", dim=4
    ).double()
    (prototypes,) = (parameter.detach() for parameter in term.parameters())
    z = torch.nn.functional.normalize(torch.cat(leaves), dim=1).detach()
    scores = z @ torch.nn.functional.normalize(prototypes, dim=1).T  # (16, 5)
    codes = (scores / 0.1).exp()
    for _ in range(200):  # every prototype as often as another, every row once
        codes = codes / codes.sum(0)
        codes = codes / codes.sum(1, keepdim=True)
    targets = codes.roll(8, 0)  # of the other view
    expected = torch.nn.functional.cross_entropy(scores / 0.3, targets)
    torch.testing.assert_close(term(Pairs.from_views(leaves)).loss.detach(), expected, atol=1e-8, rtol=0)


def test_barlow_twins_does_not_see_scale_and_place_of_a_column():
    leaves = embeddings(9, 2, 4, 0)
    moved = [3 * leaves[0].detach() + torch.arange(4.0), leaves[1].detach() * torch.tensor([1.0, 2.0, 5.0, 0.5])]
    of = {name: evaluate(name, leaves, Pairs.from_views(leaves))[0] for name in ("barlow_twins", "vicreg")}
    moved = [z.double().requires_grad_() for z in moved]
    again = {name: evaluate(name, moved, Pairs.from_views(moved))[0] for name in of}
    torch.testing.assert_close(again["barlow_twins"], of["barlow_twins"], atol=1e-3, rtol=0)
    assert abs(again["vicreg"] - of["vicreg"]) > 1
    own, _ = evaluate("barlow_twins(redundancy=0)", leaves, Pairs.from_views(leaves))
    z, other = ((x - x.mean(0)) / x.std(0, correction=0) for x in map(torch.detach, leaves))
    torch.testing.assert_close(own, (1 - (z * other).mean(0)).square().sum(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("norm", ["l21", "nuclear"])
def test_cllr_without_its_norm_is_nothing_at_the_identity(norm):
    leaves = embeddings(5, 2, 4, 0)
    agree(f"infonce + cllr(alpha=0, norm={norm})", "infonce", leaves, Pairs.from_views(leaves))
