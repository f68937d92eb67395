"""Limits between objectives: where one becomes another, they agree in value and gradient."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, normalize

import dipole
from dipole.core.conformance.reference import Case, uaur
from dipole.core.evaluation.diagnostics import alignment, uniformity
from dipole.core.objectives import similarity, tiles
from dipole.core.objectives.pairs import Pairs

SIZES = [(2, 2, 2, 0), (5, 3, 4, 1), (6, 2, 5, 2)]  # instances, views, width, seed


def embeddings(batch: int, views: int, dim: int, seed: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, dim, generator=source, dtype=torch.float64).requires_grad_() for _ in range(views)]


def evaluate(spec: str, leaves: list[Tensor], pairs: Pairs) -> tuple[Tensor, list[Tensor]]:
    loss = dipole.objective(spec, dim=leaves[0].shape[-1]).double()(pairs).loss
    return loss.detach(), list(torch.autograd.grad(loss, leaves))


def agree(one: str, other: str, leaves: list[Tensor], pairs: Pairs, factor: float = 1.0, atol: float = 1e-10) -> None:
    (a, da), (b, db) = evaluate(one, leaves, pairs), evaluate(other, leaves, pairs)
    torch.testing.assert_close(a, factor * b, atol=atol, rtol=1e-10)
    torch.testing.assert_close(da, [factor * each for each in db], atol=atol, rtol=1e-9)


UNIFORM = "cacr(positive_weights=uniform, negative_weights=uniform)"
OF_DCL = [f"rho={rho}, temperature=0.5, similarity={s}" for rho in (0, 0.2, 0.5) for s in ("cosine", "dot", "bilinear")]
ALIKE = [
    *((f"hcl(beta=0, {options})", f"dcl({options})") for options in OF_DCL),
    *((f"dcl(rho=0, similarity={s})", f"infonce(similarity={s})") for s in ("cosine", "dot", "bilinear")),
    *((f"hcl(rho=0, beta=0, similarity={s})", f"infonce(similarity={s})") for s in ("cosine", "dot", "bilinear")),
    ("cacr(t_pos=0, t_neg=0)", UNIFORM),
    ("tuple", "infonce"),  # every instance has a label of its own
    ("infonce(similarity=bilinear)", "infonce(similarity=dot)"),
    ("co2(weight=0)", "infonce"),
    ("align_uniform(uniform_weight=0)", "regression"),
    ("infonce + dp", "infonce + 0.1*dp"),  # a regularizer written without a weight takes its paper's
    ("infonce + cllr(alpha=0, norm=l21)", "infonce"),
    ("infonce + cllr(alpha=0, norm=nuclear)", "infonce"),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_one_objective_with_an_option_is_another(one, other, sizes):
    leaves = embeddings(*sizes)
    agree(one, other, leaves, Pairs.from_views(leaves, torch.arange(len(leaves[0]))))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_limits_on_views_and_keys(sizes):
    n, _, dim, seed = sizes
    leaves = embeddings(*sizes)
    pairs = Pairs.from_views(leaves)
    agree("hcl(beta=1e-9)", "dcl", leaves, pairs, atol=1e-6)
    uniform, gradients = evaluate(UNIFORM, leaves, pairs)
    true = uaur(Case.of(pairs))
    torch.testing.assert_close(uniform, true.detach(), atol=1e-10, rtol=0)
    torch.testing.assert_close(gradients, list(torch.autograd.grad(true, leaves)), atol=1e-10, rtol=0)
    # A margin of 4, the largest squared distance, keeps the hinge open.
    torch.testing.assert_close(evaluate("triplet(margin=4.0)", leaves, pairs), (uniform + 4, gradients))
    (mixed, _), (a, _), (b, _) = (evaluate(s, leaves, pairs) for s in ("0.3*infonce + 2.0*cacr", "infonce", "cacr"))
    torch.testing.assert_close(mixed, 0.3 * a + 2 * b)
    queries, keys, queue = embeddings(n, 3, dim, seed)
    one_row = [x.detach()[:1].requires_grad_() for x in (queries, keys, queue)]  # dcl at its floor
    agree("dcl(rho=0, similarity=dot)", "infonce(similarity=dot)", one_row, Pairs.cross(*one_row))
    bits = "blocks", "infonce(similarity=dot, temperature=1.0)"
    agree(*bits, [queries, keys], Pairs.cross(queries, keys), factor=1 / math.log(2))
    per_anchor = len(pairs.anchors) - len(leaves)
    for reduction, factor in (("anchor_sum", per_anchor), ("mean", 1), ("sum", len(pairs.anchors) * per_anchor)):
        agree(f"0.0*infonce + 1.0*dp(reduction={reduction})", "0.0*infonce + 1.0*dp", leaves, pairs, factor=factor)


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


@pytest.mark.parametrize("loss", ["logistic", "hinge"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_single_point_blocks_are_l_un(sizes, loss):
    """L_un (Arora Eqs. 4-6) over all other blocks: l of f(x)^T ( f(x+) - f(x_m^-) )."""
    n, _, dim, seed = sizes
    (x,) = embeddings(n * 3, 1, dim, seed)
    blocks = x.view(n, 3, dim)
    total = 0.0 * x.sum()  # where every hinge is inactive the gradient is 0, not missing
    for i in range(n):
        v = torch.stack([blocks[i, 0] @ (blocks[i, 1] - blocks[m, 1]) for m in range(n) if m != i])
        of = torch.log2(1 + (-v).exp().sum()) if loss == "logistic" else (1 - v.min()).clamp_min(0)
        total = total + of / n
    found = evaluate(f"blocks(b=1, loss={loss})", [x], Pairs.from_blocks(blocks))
    torch.testing.assert_close(found, (total.detach(), list(torch.autograd.grad(total, [x]))))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_several_positives_are_averaged_and_the_first_are_chosen(sizes):
    leaves = embeddings(*sizes)
    pairs = Pairs.from_views(leaves)
    count = pairs.positives.shape[1]

    def alone(k):
        others = torch.cat([pairs.positives[:, :k], pairs.positives[:, k + 1 :]], 1)
        ignored = torch.cat([pairs.ignored, others], 1)
        return Pairs(pairs.anchors, pairs.candidates, pairs.positives[:, k : k + 1], ignored)

    total = sum(dipole.objective("infonce")(alone(k)).loss / count for k in range(count))
    found = evaluate("infonce", leaves, pairs)
    torch.testing.assert_close(found, (total.detach(), list(torch.autograd.grad(total, leaves))))
    torch.testing.assert_close(evaluate("cacr(k=1)", leaves, pairs), evaluate("cacr", leaves, alone(0)))
    joint, _ = evaluate("infonce(joint=true)", leaves, pairs)
    assert (abs(joint - found[0]) > 0.05) == (count > 1)


def test_objectives_with_options_are_others_on_their_layouts():
    f, g = leaves = embeddings(6, 2, 4, 0)
    window = Pairs.from_window(f, g, torch.tensor([0, 0, 0, 1, 1, 1]))
    agree("quickthoughts", "infonce(similarity=dot, temperature=1.0, joint=true)", leaves, window)
    pairs = Pairs.from_views(leaves)
    value, _ = evaluate("vicreg(variance=0, covariance=0)", leaves, pairs)
    torch.testing.assert_close(value, 25 / 4 * (f - g).detach().square().sum(1).mean())
    rbf, _ = evaluate("cacr(cost=rbf, rbf_t=3.0, negative_weights=uniform)", leaves, pairs)
    uniform, _ = evaluate("align_uniform(t=3.0, align_weight=0, uniform_over=pairs)", leaves, pairs)
    distance = 2 - 2 * cosine_similarity(f, g).detach()
    torch.testing.assert_close(rbf, uniform - (-3 * distance).exp().mean(), atol=1e-10, rtol=0)


@pytest.mark.parametrize("layout", ["views", "cross"])
def test_dp_is_the_mean_over_pairs_of_instances(layout):
    """A float64 loop: with two instances per batch and with ten, the default does not grow with their number."""
    for batch in (2, 10):
        one, other = (leaf.detach() for leaf in embeddings(batch, 2, 4, batch))
        pairs, rows, others = Pairs.cross(one, other), list(enumerate(one)), list(enumerate(other))
        if layout == "views":
            pairs, rows = Pairs.from_views([one, other]), rows + others
            others = rows
        distances = [(1 - float(cosine_similarity(x, y, 0))) / 2 for i, x in rows for j, y in others if i != j]
        penalties = [abs(min((distance - 0.1) * (distance - 0.5), 0)) for distance in distances]
        assert sum(penalties) > 0
        found = dipole.objective("dp")(pairs).terms["dp"].value
        assert float(found) == pytest.approx(math.fsum(penalties) / len(penalties), rel=1e-12)


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
    optimizer = torch.optim.Adam([f, g], 0.1)
    for _ in range(150):
        optimizer.zero_grad()
        term(layout(f, g)).loss.backward()
        optimizer.step()
    pairs = layout(f.detach(), g.detach())
    assert float(term(pairs).loss) < -1.5
    assert alignment(pairs) < 0.1
    assert uniformity(pairs) < -1.5


def test_uniformity_leaves_ignored_rows_of_a_view_out():
    leaves = embeddings(5, 2, 4, 0)
    ignored = torch.full((10, 1), -1)
    ignored[0], ignored[7] = 3, 6  # image 3 for image 0 in the first view, image 1 for image 2 in the second
    unit = [normalize(z.detach(), dim=1) for z in leaves]
    kernels = [(-2 * (2 - 2 * z @ z.T)).exp().fill_diagonal_(0) for z in unit]
    kernels[0][0, 3] = kernels[1][2, 1] = 0
    expected = (2 - 2 * (unit[0] * unit[1]).sum(1)).mean() + sum((e.sum() / 19).log() for e in kernels) / 2
    found, _ = evaluate("align_uniform", leaves, Pairs.from_views(leaves).without(ignored))
    torch.testing.assert_close(found, expected)


def test_siglip_is_binary_and_infonce_is_not():
    leaves = embeddings(2, 2, 4, 0)
    pairs = Pairs.cross(*leaves)
    z = (normalize(leaves[0], dim=1) @ normalize(leaves[1], dim=1).T / 0.5).detach()
    own, other = z.diagonal(), z.flip(1).diagonal()
    binary = ((1 + (-own).exp()).log() + (1 + other.exp()).log()).mean()
    torch.testing.assert_close(evaluate("siglip(temperature=0.5, bias=0)", leaves, pairs)[0], binary)
    torch.testing.assert_close(evaluate("infonce", leaves, pairs)[0], (1 + (other - own).exp()).log().mean())


def test_swav_is_cross_entropy_to_its_codes():
    leaves = embeddings(8, 2, 4, 0)
    term = dipole.objective(
        "swav(prototypes=5, temperature=0.3, epsilon=0.1, iterations=200, codes=all)", dim=4
    ).double()
    (prototypes,) = (parameter.detach() for parameter in term.parameters())
    scores = normalize(torch.cat(leaves), dim=1).detach() @ normalize(prototypes, dim=1).T  # (16, 5)
    codes = (scores / 0.1).exp()
    for _ in range(200):  # every prototype as often as another, every row once
        codes = codes / codes.sum(0)
        codes = codes / codes.sum(1, keepdim=True)
    expected = cross_entropy(scores / 0.3, codes.roll(8, 0))  # codes of the other view
    torch.testing.assert_close(term(Pairs.from_views(leaves)).loss.detach(), expected, atol=1e-8, rtol=0)


def test_barlow_twins_does_not_see_scale_and_place_of_a_column():
    leaves = embeddings(9, 2, 4, 0)
    moved = [3 * leaves[0].detach() + torch.arange(4.0), leaves[1].detach() * torch.tensor([1.0, 2.0, 5.0, 0.5])]
    moved = [z.double().requires_grad_() for z in moved]
    of, again = (
        {name: evaluate(name, z, Pairs.from_views(z))[0] for name in ("barlow_twins", "vicreg")}
        for z in (leaves, moved)
    )
    torch.testing.assert_close(again["barlow_twins"], of["barlow_twins"], atol=1e-3, rtol=0)
    assert abs(again["vicreg"] - of["vicreg"]) > 1
    own, _ = evaluate("barlow_twins(redundancy=0)", leaves, Pairs.from_views(leaves))
    z, other = ((x - x.mean(0)) / x.std(0, correction=0) for x in map(torch.detach, leaves))
    torch.testing.assert_close(own, (1 - (z * other).mean(0)).square().sum(), atol=1e-3, rtol=0)
