"""CLLR beyond its value: proximal steps reach zeros, pruning keeps what the papers keep, features are projected."""

import pytest
import torch

import dipole
from dipole.core.contrast.regularizers.cllr import shrink_columns, shrink_spectrum


@pytest.mark.parametrize(
    ("shrink", "norm"),
    [
        (shrink_columns, lambda L: sum(L[:, j].norm() for j in range(L.shape[1]))),
        (shrink_spectrum, lambda L: torch.linalg.matrix_norm(L, "nuc")),
    ],
)
def test_shrinking_is_the_proximal_map(shrink, norm):
    """prox(L) minimises 0.5 |X - L|^2 + t norm(X): no random step from it goes lower."""
    generator = torch.Generator().manual_seed(0)
    L = torch.randn(6, 6, dtype=torch.double, generator=generator)
    for threshold in (0.1, 1.0, 2.5):
        best = shrink(L, threshold)

        def energy(X, threshold=threshold):
            return 0.5 * (X - L).square().sum() + threshold * norm(X)

        lowest = energy(best)
        for scale in (1e-3, 1e-1, 1.0):
            for _ in range(50):
                step = scale * torch.randn(6, 6, dtype=torch.double, generator=generator)
                assert energy(best + step) >= lowest - 1e-12
        assert energy(L) >= lowest


@pytest.mark.parametrize("norm", ["l21", "nuclear"])
def test_proximal_solver_reaches_exact_zeros(norm):
    generator = torch.Generator().manual_seed(0)
    low = 3 * torch.randn(64, 3, generator=generator) @ torch.eye(3, 10)  # seven columns are not needed
    if norm == "nuclear":
        low = low @ torch.linalg.qr(torch.randn(10, 10, generator=generator))[0]  # seven directions are not needed
    ranks = {}
    for solver in ("proximal", "subgradient"):
        objective = dipole.objective(f"infonce + 0.1*cllr(dim=10, norm={norm}, solver={solver})")
        term = objective.terms[1]
        optimizer = torch.optim.SGD(objective.parameters(), lr=2e-3)
        for _ in range(700):
            optimizer.zero_grad()
            objective(low, low).loss.backward()
            optimizer.step()
            objective.after_step(2e-3)
        size = term.L.norm(dim=0) if norm == "l21" else torch.linalg.svdvals(term.L)
        ranks[solver] = int((size > 1e-6).sum())
    assert ranks["proximal"] == 3
    if norm == "l21":
        assert ranks["subgradient"] == 10


def test_prune():
    columns = dipole.objective("infonce+cllr(dim=4)").terms[1]
    with torch.no_grad():
        columns.L.copy_(torch.diag(torch.tensor([1.0, 0.0, 2.0, 1e-7])))
    assert columns.prune().shape == (4, 2)
    assert columns.summary() == {"rank": 2.0, "columns": 2.0}

    dependent = dipole.objective("infonce+cllr(dim=4, norm=nuclear)").terms[1]
    with torch.no_grad():
        first, second = torch.randn(2, 4)
        dependent.L.copy_(torch.stack([first, 2 * first, second, first - second], 1))
    pruned = dependent.prune()
    assert pruned.shape == (4, 4)
    assert int((pruned.norm(dim=0) > 0).sum()) == 2
    assert torch.linalg.matrix_rank(pruned) == 2


def test_features_for_downstream_use_are_projected():
    objective = dipole.objective("infonce+cllr(dim=3)")
    with torch.no_grad():
        objective.terms[1].L.copy_(torch.arange(9.0).view(3, 3))
    x = torch.randn(5, 3)
    torch.testing.assert_close(objective.transform(x), x @ torch.arange(9.0).view(3, 3).T)
    assert dipole.objective("infonce").transform(x) is x


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
