"""CLLR beyond its value: proximal steps reach zeros, pruning keeps what the papers keep, features are projected."""

import numpy as np
import pytest
import torch

import dipole
from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.objectives.regularizers.cllr import reconstruction, shrink_columns, shrink_spectrum, survives_above
from dipole.core.objectives.spectrum import converged, distance_from_identity, effective_rank
from dipole.core.train.evaluation import diagnose_objective
from dipole.core.train.identity import written_out


@pytest.mark.parametrize("threshold", [0.1, 1.0, 2.5])
@pytest.mark.parametrize(
    ("shrink", "norm"),
    [(shrink_columns, lambda L: L.norm(dim=0).sum()), (shrink_spectrum, lambda L: torch.linalg.matrix_norm(L, "nuc"))],
)
def test_shrinking_is_the_proximal_map(shrink, norm, threshold):
    """prox(L) minimises 0.5 |X - L|^2 + t norm(X): no random step from it goes lower."""
    generator = torch.Generator().manual_seed(0)
    L = torch.randn(6, 6, dtype=torch.double, generator=generator)
    best = shrink(L, threshold)

    def energy(X):
        return 0.5 * (X - L).square().sum() + threshold * norm(X)

    steps = [scale * torch.randn(6, 6, dtype=torch.double, generator=generator) for scale in 50 * (1e-3, 1e-1, 1.0)]
    assert min(energy(best + step) for step in steps) >= energy(best) - 1e-12
    assert energy(L) >= energy(best)


@pytest.mark.parametrize(
    ("norm", "solver", "rank"), [("l21", "proximal", 3), ("nuclear", "proximal", 3), ("l21", "subgradient", 10)]
)
def test_proximal_solver_reaches_exact_zeros(norm, solver, rank):
    generator = torch.Generator().manual_seed(0)
    low = 3 * torch.randn(64, 3, generator=generator) @ torch.eye(3, 10)  # seven columns are not needed
    if norm == "nuclear":
        low = low @ torch.linalg.qr(torch.randn(10, 10, generator=generator))[0]  # seven directions are not needed
    objective = dipole.objective(f"infonce + 0.1*cllr(dim=10, norm={norm}, solver={solver})")
    L = objective.terms[1].L
    optimizer = torch.optim.SGD(objective.parameters(), lr=2e-3)
    for _ in range(700):
        optimizer.zero_grad()
        objective(low, low).loss.backward()
        optimizer.step()
        objective.after_step(2e-3)
    size = L.norm(dim=0) if norm == "l21" else torch.linalg.svdvals(L)
    assert int((size > 1e-6).sum()) == rank


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
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(2)).double()
    L = torch.randn(5, 5, generator=torch.Generator().manual_seed(3)).double()
    term = with_projection("features=unit, alpha=0", L).double()
    z = x / x.norm(dim=1, keepdim=True)
    assert term(x, x).item() == pytest.approx(float(reconstruction(L, z).mean()))
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
    """L that shrinks as a whole loses its rank; what counts as zero is a length, not a share of the longest column."""
    shrunk = with_projection(f"norm={norm}", 9e-4 * torch.eye(6))
    assert shrunk.summary().items() >= {"rank": 0.0, "columns": 0.0, "effective_rank": 0.0}.items()
    mixed = with_projection(f"norm={norm}", torch.diag(torch.tensor([100.0, 0.5, 0.03, 0.009])))
    assert mixed.summary()["rank"] == mixed.summary()["columns"] == 3
    assert int((mixed.prune(0.1).norm(dim=0) > 0).sum()) == 2
    coarse = with_projection(f"norm={norm}, tolerance=0.1", mixed.L.detach())
    assert coarse.summary()["rank"] == coarse.summary()["columns"] == 2
    fine = with_projection(f"norm={norm}, tolerance=1e-5", 9e-4 * torch.eye(6))
    assert fine.summary()["rank"] == 6


def test_effective_rank_against_numpy():
    x = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    values = np.linalg.svd(x.numpy().astype(np.float64), compute_uv=False)
    share = values / values.sum()
    assert effective_rank(x) == pytest.approx(np.exp(-(share * np.log(share)).sum()), rel=1e-6)
    assert effective_rank(7 * x) == pytest.approx(effective_rank(x), rel=1e-6)
    assert effective_rank(torch.eye(5)) == pytest.approx(5)
    assert effective_rank(x[:, :1] @ x[:1]) == pytest.approx(1, abs=1e-3)
    assert effective_rank(torch.zeros(3, 4)) == 0
    assert effective_rank(torch.diag(torch.tensor([1.0, 1.0, 1e-3])), tolerance=0.01) == pytest.approx(2)
    assert np.isnan(effective_rank(torch.full((2, 2), float("inf"))))


def test_distance_from_identity():
    assert distance_from_identity(-0.3 * torch.eye(5)) == pytest.approx(0, abs=1e-7)
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert distance_from_identity(swap) == pytest.approx(1)
    assert distance_from_identity(torch.diag(torch.tensor([1.0, 3.0]))) == pytest.approx((2 / 10) ** 0.5)


def test_numbers_of_the_projection_are_logged_beside_those_of_the_features():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 3, generator=generator) @ torch.randn(3, 6, generator=generator)
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
    x = torch.diag((4 * energy).sqrt())  # four rows; their mean outer product is diag(energy)
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
    torch.testing.assert_close(
        4 * energy[[3, 2]] * values[:2] * (1 - values[:2] ** 2), torch.full((2,), alpha).double()
    )
    if norm == "nuclear":
        assert term.summary()["rank"] <= term.measure(x)["energy"] / survives_above(alpha)


def test_singular_values_that_do_not_converge_in_single_precision_are_those_of_double():
    """LAPACK gives up on some matrices of a projection that loses nearly all its directions."""

    def gives_up(matrix):
        if matrix.dtype != torch.float64:
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return torch.linalg.svdvals(matrix)

    L = torch.randn(9, 9, generator=torch.Generator().manual_seed(3)).requires_grad_()
    size = converged(gives_up, L).sum()
    size.backward()
    U, S, V = np.linalg.svd(L.detach().double().numpy())
    assert (size.item(), L.grad.dtype) == (pytest.approx(S.sum(), rel=1e-12), torch.float32)
    np.testing.assert_allclose(L.grad.numpy(), U @ V, atol=1e-6)
    for hopeless in (L.double(), torch.full((3, 3), float("nan"))):
        with pytest.raises(torch.linalg.LinAlgError):
            converged(lambda matrix: gives_up(matrix.float()), hopeless)


def released_by_loops(L, views):
    """The authors' form: rows at length 1, the Frobenius norm of each view over its rows, added up."""

    def unit(x):
        return x / (sum(value * value for value in x)) ** 0.5

    found = 0.0
    for view in views:
        squares = 0.0
        for row in view:
            low = [sum(a * b for a, b in zip(line, unit(row), strict=True)) for line in L]
            back = torch.stack([sum(line[j] * low[r] for r, line in enumerate(L)) for j in range(len(row))])
            squares = squares + sum((a - b) ** 2 for a, b in zip(unit(row), unit(back), strict=True))
        found = found + squares**0.5 / len(view)
    return found


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


def test_the_views_of_pairs_are_those_of_anchors_and_candidates_without_a_queue():
    generator = torch.Generator().manual_seed(0)
    a, b, c, queue = (torch.randn(4, 5, dtype=torch.double, generator=generator) for _ in range(4))
    term = released(3, 5).terms[1]
    cases = [
        (dipole.Pairs.cross(a, b, queue), [a, b]),
        (dipole.Pairs.cross(a, torch.stack([b, c], 1), queue, intra_batch=True), [a, b, c]),
        (dipole.Pairs.from_views([a, b, c], negatives="queries"), [a, b, c]),
        (dipole.Pairs.from_blocks(torch.stack([a, b], 1), anchors="all"), [torch.stack([a, b], 1).flatten(0, 1)]),
        (dipole.Pairs.from_window(a, b, torch.tensor([0, 0, 1, 1]), self_logit="zero"), [a, b]),
    ]
    for pairs, views in cases:
        assert term(pairs).item() == pytest.approx(float(released_by_loops(term.L, views)), abs=1e-12)


def test_the_released_form_acts_on_the_features_before_a_head():
    generator = torch.Generator().manual_seed(0)
    rows = {
        name: torch.randn(4, 3 if name[0] == "z" else 8, dtype=torch.double, generator=generator)
        for name in ("z0", "z1", "h0", "h1")
    }
    z, h = [rows["z0"], rows["z1"]], [rows["h0"], rows["h1"]]
    objective = dipole.objective("infonce + cllr(variant=released, rank=2)").build(3, 8).double()

    def relate(rows):
        return dipole.Pairs.from_views([rows["z0"], rows["z1"]])

    found = objective(EncodedBatch(rows, relate, features=("h0", "h1"))).terms
    assert float(found["cllr"]) == pytest.approx(float(released_by_loops(objective.terms[1].L, h)), abs=1e-12)
    assert float(found["infonce"]) == pytest.approx(float(dipole.objective("infonce")(*z).loss))
    with pytest.raises(dipole.PairsError, match="names 'h2'"):
        objective(EncodedBatch(rows, relate, features=("h2",)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *(
            (f"variant=released, {option}", f"cllr: {option.partition('=')[0]} is of variant=printed")
            for option in ("norm=l21", "alpha=10", "solver=subgradient", "features=raw", "tolerance=0.01")
        ),
        ("rank=512", "cllr: rank is of variant=released"),
        ("variant=printed, rank=3", "cllr: rank is of variant=released"),
    ],
)
def test_options_of_the_other_form_are_refused_by_name(options, said):
    with pytest.raises(dipole.SpecError, match=said):
        dipole.objective(f"infonce + cllr({options})")


def test_runs_of_the_printed_form_keep_their_names():
    texts = ("infonce + cllr", "infonce + cllr(variant=printed)", "infonce + cllr(variant=released)")
    default, printed, other = (written_out(dipole.objective(text)) for text in texts)
    assert "variant" not in default[1][2]
    assert other != printed
