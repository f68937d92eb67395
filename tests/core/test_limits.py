"""Beyond the reference loops: limits between objectives, learned temperatures, and the solvers of CLLR."""

import copy
import math

import numpy as np
import pytest
import torch
from loops import draw
from torch import Tensor
from torch.nn.functional import normalize

import dipole
from dipole import EncodedBatch, OptionError, Pairs
from dipole.core.objectives import similarity, tiles
from dipole.core.objectives.registry import registry
from dipole.core.objectives.regularizers.cllr import reconstruction, shrink_columns, shrink_spectrum, survives_above
from dipole.core.objectives.spec import parse
from dipole.core.objectives.spectrum import converged, distance_from_identity, effective_rank
from dipole.core.train.config import TrainConfig
from dipole.core.train.evaluation import diagnose_objective
from dipole.core.train.identity import written_out
from dipole.core.train.update import build_optimizer
from tests.runs import refused

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
    ("cacr(t_pos=0, t_neg=0)", UNIFORM), ("infonce(similarity=bilinear)", "infonce(similarity=dot)"),
    ("co2(weight=0)", "infonce"), ("align_uniform(uniform_weight=0)", "regression"),
    ("tuple", "infonce"),  # every instance has a label of its own
    ("infonce + dp", "infonce + 0.1*dp"),  # a regularizer written without a weight takes its paper's
    *((f"infonce + cllr(alpha=0, norm={norm})", "infonce") for norm in ("l21", "nuclear")),
]  # fmt: skip


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


@pytest.mark.parametrize(("tile", "largest"), [(512, similarity.LARGEST), (5, 0)])
def test_sharp_cacr_tends_to_the_hardest_triplet(tile, largest, monkeypatch):
    monkeypatch.setattr(tiles, "TILE", tile)
    monkeypatch.setattr(similarity, "LARGEST", largest)
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


TEMPERED = [
    entry.name
    for entry in registry.entries("objective")
    if any(option.name == "temperature" and "learned" in option.choices for option in entry.options)
]


def test_saved_copied_and_shown_under_stable_names():
    assert {"infonce", "dcl", "hcl", "co2", "tuple", "quickthoughts", "supcon", "siglip"} <= set(TEMPERED)
    assert "swav" not in TEMPERED
    objective = dipole.objective("infonce(temperature=learned, init=0.2) + 0.1*dp")
    assert objective.terms[0].summary() == {"temperature": pytest.approx(0.2)}
    with torch.no_grad():
        objective.terms[0].logit_scale.fill_(1.5)
    fresh = dipole.objective(str(objective))
    fresh.load_state_dict(objective.state_dict())
    for same in (fresh, copy.deepcopy(objective)):
        assert same.terms[0].summary()["temperature"] == pytest.approx(math.exp(-1.5))
    assert dipole.objective("infonce").state_dict() == {}
    assert dipole.objective("infonce(temperature=0.2)").terms[0].summary() == {}
    learned = dipole.objective("siglip").terms[0].summary()
    assert learned == {"temperature": pytest.approx(0.1), "bias": pytest.approx(-10)}
    for given in ({"temperature": 0.2}, {"temperature": "learned", "init": 0.2}):
        text = f"infonce({', '.join(f'{name}={value}' for name, value in given.items())})"
        built = dipole.objective(text)
        assert written_out(built)[0][2] == given | {"similarity": "cosine", "joint": False}
        assert str(built) == text
        assert parse(text)[0].options == tuple(given.items())


def test_the_scale_starts_at_init_and_stops_at_100():
    """As CLIP's logit scale."""
    objective = dipole.objective("infonce(temperature=learned, init=0.07)")
    optimizer = torch.optim.Adam(objective.parameters(), lr=0.2)
    x, seen = draw(12, 6).detach().float(), []
    for _ in range(40):  # both sides are equal: the scale can only grow
        seen.append(objective.terms[0].summary()["temperature"])
        optimizer.zero_grad()
        objective(Pairs.both(x, x)).loss.backward()
        optimizer.step()
        objective.after_step(0.2)
    assert seen[0] == pytest.approx(0.07)
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == pytest.approx(0.01)


def test_a_learned_temperature_cannot_be_set_and_weight_decay_leaves_it_alone():
    with pytest.raises(OptionError, match="learned and cannot be set"):
        dipole.objective("infonce(temperature=learned)").terms[0].temperature = 0.2
    objective = dipole.objective("siglip + cllr(dim=4)", dim=4)
    config = TrainConfig(steps=1, optimizer="adamw", learning_rate=0.1, weight_decay=0.3)
    groups = build_optimizer(config, objective.parameters()).param_groups
    decays = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    of = {name: decays[id(parameter)] for name, parameter in objective.named_parameters()}
    assert of == {"terms.0.logit_scale": 0, "terms.0.bias": 0, "terms.1.L": 0.3}


def test_supcon_of_views_is_that_of_labels_and_without_labels_simclr():
    f, labels = normalize(draw(2, 6, 4), dim=2), torch.tensor([0, -1, 0, -1, 1, 0])
    for variant in ("out", "in"):
        objective = dipole.objective(f"supcon(variant={variant})")
        of_views = Pairs.from_views(list(f), labels)
        torch.testing.assert_close(objective(of_views).loss, objective(Pairs.from_labels(list(f), labels)).loss)
        torch.testing.assert_close(objective(*f).loss, dipole.objective("infonce(temperature=0.1)")(*f).loss)


@pytest.mark.parametrize("threshold", [0.1, 1.0, 2.5])
@pytest.mark.parametrize(("shrink", "norm"), [
    (shrink_columns, lambda L: L.norm(dim=0).sum()), (shrink_spectrum, lambda L: torch.linalg.matrix_norm(L, "nuc")),
])  # fmt: skip
def test_shrinking_is_the_proximal_map(shrink, norm, threshold):
    """prox(L) minimises 0.5 |X - L|^2 + t norm(X): no random step from it goes lower."""
    L = draw(6, 6).detach()
    best = shrink(L, threshold)

    def energy(X):
        return 0.5 * (X - L).square().sum() + threshold * norm(X)

    steps = [scale * draw(6, 6, seed=seed) for seed, scale in enumerate(50 * (1e-3, 1e-1, 1.0))]
    assert min(energy(best + step) for step in steps) >= energy(best) - 1e-12
    assert energy(L) >= energy(best)


def with_projection(options, L):
    term = dipole.objective(f"infonce+cllr(dim={len(L)}, {options})").terms[1]
    with torch.no_grad():
        term.L.copy_(L)
    return term


def test_prune():
    columns = with_projection("norm=l21", torch.diag(torch.tensor([1.0, 0.0, 2.0, 1e-7])))
    assert columns.prune().shape == (4, 2)
    assert columns.summary().items() >= {"rank": 2.0, "columns": 2.0}.items()
    first, second = torch.randn(2, 4)
    pruned = with_projection("norm=nuclear", torch.stack([first, 2 * first, second, first - second], 1)).prune()
    assert pruned.shape == (4, 4)
    assert (int((pruned.norm(dim=0) > 0).sum()), torch.linalg.matrix_rank(pruned)) == (2, 2)


def test_features_are_projected():
    objective = dipole.objective("infonce+cllr(dim=3)")
    with torch.no_grad():
        objective.terms[1].L.copy_(torch.arange(9.0).view(3, 3))
    x = torch.randn(5, 3)
    torch.testing.assert_close(objective.transform(x), x @ torch.arange(9.0).view(3, 3).T)
    assert dipole.objective("infonce").transform(x) is x
    x, L = draw(12, 5, seed=2), draw(5, 5, seed=3).float()
    term, L = with_projection("features=unit, alpha=0", L).double(), L.double()
    assert term(x, x).item() == pytest.approx(float(reconstruction(L, x / x.norm(dim=1, keepdim=True)).mean()))
    assert term(1000 * x, 1000 * x).item() == pytest.approx(term(x, x).item())
    torch.testing.assert_close(term.transform(x), x @ L.T)  # what is used downstream stays linear in Phi


def test_parameters_without_dim_are_created_at_the_first_call_and_then_trained():
    objective = dipole.objective("infonce(similarity=bilinear)+cllr")
    optimizer = torch.optim.Adam(objective.parameters(), lr=0.1)
    z = torch.randn(8, 5)
    before = float(objective(z, z + 0.1).loss.detach())
    for _ in range(10):
        optimizer.zero_grad()
        objective(z, z + 0.1).loss.backward()
        optimizer.step()
    assert float(objective(z, z + 0.1).loss.detach()) < before
    fresh = dipole.objective("infonce(similarity=bilinear)+cllr")
    assert fresh.state_dict() == {}
    fresh.load_state_dict(objective.state_dict())
    assert torch.equal(fresh(z, z).loss, objective(z, z).loss)


@pytest.mark.parametrize("norm", ["l21", "nuclear"])
def test_what_is_small_is_nothing_however_small_the_rest(norm):
    """L that shrinks as a whole loses its rank. What counts as zero is a length, not a share of the longest column."""
    small, mixed = 9e-4 * torch.eye(6), torch.diag(torch.tensor([100.0, 0.5, 0.03, 0.009]))
    wider = ", tolerance=0.1"
    for L, options, rank in ((small, "", 0), (small, ", tolerance=1e-5", 6), (mixed, "", 3), (mixed, wider, 2)):
        found = with_projection(f"norm={norm}{options}", L).summary()
        assert found["rank"] == found["columns"] == rank
        assert (found["effective_rank"] == 0) == (rank == 0)
    assert int((with_projection(f"norm={norm}, tolerance=0.1", mixed).prune().norm(dim=0) > 0).sum()) == 2


def test_effective_rank_and_distance_from_identity():
    x = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    values = np.linalg.svd(x.numpy().astype(np.float64), compute_uv=False)
    share = values / values.sum()
    assert effective_rank(x) == pytest.approx(np.exp(-(share * np.log(share)).sum()), rel=1e-6)
    assert effective_rank(torch.eye(5)) == pytest.approx(5)
    assert effective_rank(x[:, :1] @ x[:1]) == pytest.approx(1, abs=1e-3)
    assert effective_rank(torch.zeros(3, 4)) == 0
    assert effective_rank(torch.diag(torch.tensor([1.0, 1.0, 1e-3])), tolerance=0.01) == pytest.approx(2)
    assert np.isnan(effective_rank(torch.full((2, 2), float("inf"))))
    assert distance_from_identity(-0.3 * torch.eye(5)) == pytest.approx(0, abs=1e-7)
    assert distance_from_identity(torch.eye(2).flip(0)) == pytest.approx(1)
    assert distance_from_identity(torch.diag(torch.tensor([1.0, 3.0]))) == pytest.approx((2 / 10) ** 0.5)


def test_numbers_of_the_projection_are_logged_beside_those_of_the_features():
    x = (draw(40, 3) @ draw(3, 6, seed=1)).detach().float()
    objective = dipole.objective("infonce + 0.1*cllr(dim=6, norm=nuclear)")
    with torch.no_grad():
        objective.terms[1].L.copy_(torch.diag(torch.tensor([0.9, 0.8, 0.0, 0.0, 0.0, 0.0])))
    found = diagnose_objective(objective, x)
    L, rows = objective.terms[1].L.detach().double().numpy(), x.double().numpy()
    lost = sum(np.square(L.T @ L @ row - row).sum() for row in rows)
    assert found["cllr.error"] == pytest.approx(lost / np.square(rows).sum(), rel=1e-5)
    assert found["cllr.energy"] == pytest.approx(np.mean([row @ row for row in rows]), rel=1e-5)
    assert found["cllr.data_rank"] == np.linalg.matrix_rank(rows @ L.T) == 2
    assert found["cllr.data_effective_rank"] == pytest.approx(effective_rank(x @ objective.terms[1].L.T), rel=1e-4)
    assert found["cllr.norm"] == pytest.approx(1.7)
    assert found["cllr.frobenius"] == pytest.approx((0.81 + 0.64) ** 0.5)
    assert found["cllr.spectral"] == pytest.approx(0.9)


@pytest.mark.parametrize("norm", ["nuclear", "l21"])
def test_a_direction_is_kept_by_its_energy_against_alpha(norm):
    """Descent from the identity: energies above 3 sqrt(3)/8 alpha keep their direction, those below lose it."""
    alpha = 2.0
    energy = survives_above(alpha) * torch.tensor([0.1, 0.9, 1.1, 4.0]).double()
    x = torch.diag((4 * energy).sqrt())  # four rows, whose mean outer product is diag(energy)
    if norm == "nuclear":
        x = x @ torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).double())[0]
    term = with_projection(f"norm={norm}, alpha={alpha}, solver=proximal", torch.eye(4)).double()
    rate = 0.02
    for _ in range(800):
        (gradient,) = torch.autograd.grad(reconstruction(term.L, x).mean(), [term.L])
        with torch.no_grad():
            term.L -= rate * gradient
        term.after_step(rate, 1.0)
    values = torch.linalg.svdvals(term.L.detach())
    assert term.summary()["rank"] == 2
    assert float(values[1]) > 3**-0.5
    assert float(values[2]) < 1e-12
    # The kept value solves 4 s l (1 - l^2) = alpha.
    found = 4 * energy[[3, 2]] * values[:2] * (1 - values[:2] ** 2)
    torch.testing.assert_close(found, torch.full((2,), alpha).double())
    if norm == "nuclear":
        assert term.summary()["rank"] <= term.measure(x)["energy"] / survives_above(alpha)


def test_singular_values_that_do_not_converge_in_single_precision_are_those_of_double():
    """LAPACK gives up on some matrices of a projection that loses nearly all its directions."""

    def gives_up(matrix):
        if matrix.dtype != torch.float64:
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return torch.linalg.svdvals(matrix)

    L = draw(9, 9, seed=3).detach().float().requires_grad_()
    size = converged(gives_up, L).sum()
    size.backward()
    U, S, V = np.linalg.svd(L.detach().double().numpy())
    assert (size.item(), L.grad.dtype) == (pytest.approx(S.sum(), rel=1e-12), torch.float32)
    np.testing.assert_allclose(L.grad.numpy(), U @ V, atol=1e-6)
    for hopeless in (L.double(), torch.full((3, 3), float("nan"))):
        refused(torch.linalg.LinAlgError, None, converged, lambda matrix: gives_up(matrix.float()), hopeless)


def released(rank, width, seed=0):
    torch.manual_seed(seed)
    return dipole.objective(f"infonce + cllr(variant=released, rank={rank})", dim=width).double()


def test_the_released_form_starts_from_a_normal_draw_and_projects_nothing():
    L = released(400, 300).terms[1].L.detach()
    assert L.shape == (400, 300)
    assert (float(L.mean()), float(L.std())) == (pytest.approx(0, abs=0.01), pytest.approx(1, abs=0.01))
    assert dipole.objective("infonce + cllr(variant=released)", dim=2048).terms[1].L.shape == (512, 2048)
    x = torch.randn(5, 300)
    assert released(4, 300).transform(x) is x
    term = released(2, 6).terms[1]
    assert (term.summary()["rank"], term.remarks()) == (2, [])
    assert term.measure(torch.randn(3, 6)) == {}
    # Runs of the printed form keep their names.
    texts = ("infonce + cllr", "infonce + cllr(variant=printed)", "infonce + cllr(variant=released)")
    default, printed, other = (written_out(dipole.objective(text)) for text in texts)
    assert "variant" not in default[1][2]
    assert other != printed


def test_the_released_form_acts_on_the_features_before_a_head():
    z, h = draw(2, 4, 3), draw(2, 4, 8, seed=1)
    rows = {"z0": z[0], "z1": z[1], "h0": h[0], "h1": h[1]}
    objective = dipole.objective("infonce + cllr(variant=released, rank=2)").build(3, 8).double()

    def relate(rows):
        return dipole.Pairs.from_views([rows["z0"], rows["z1"]])

    found = objective(EncodedBatch(rows, relate, features=("h0", "h1"))).terms
    assert float(found["cllr"]) == pytest.approx(float(objective.terms[1](dipole.Pairs.from_views(list(h)))), abs=1e-12)
    assert float(found["infonce"]) == pytest.approx(float(dipole.objective("infonce")(*z).loss))
    refused(dipole.PairsError, "names 'h2'", objective, EncodedBatch(rows, relate, features=("h2",)))
