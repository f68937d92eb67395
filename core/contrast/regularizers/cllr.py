"""Low-dimensional reconstruction: a sparse or low-rank projection through which embeddings must be recoverable."""

from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from dipole.core.contrast.objective import Objective, Rows
from dipole.core.contrast.options import Range
from dipole.core.contrast.registry import register
from dipole.core.contrast.similarity import full_precision


def reconstruction(L: Tensor, features: Tensor) -> Tensor:
    """|| L^T L Phi - Phi ||^2 of each row, (A,)."""
    return (features @ L.T @ L - features).square().sum(1)


def l21(L: Tensor) -> Tensor:
    """Sum of the L2 norms of the columns."""
    size: Tensor = torch.linalg.vector_norm(L, dim=0).sum()
    return size


def nuclear(L: Tensor) -> Tensor:
    """Sum of the singular values."""
    size: Tensor = torch.linalg.svdvals(L).sum()
    return size


def shrink_columns(L: Tensor, threshold: float) -> Tensor:
    """Proximal map of threshold * l21: each column shortened by the threshold, short ones become zero."""
    norms: Tensor = torch.linalg.vector_norm(L, dim=0)
    return L * (1 - threshold / norms.clamp_min(threshold)).clamp_min(0)


def shrink_spectrum(L: Tensor, threshold: float) -> Tensor:
    """Proximal map of threshold * nuclear: singular values lowered by the threshold, small ones become zero."""
    U, S, V = torch.linalg.svd(L, full_matrices=False)
    shrunk: Tensor = (U * (S - threshold).clamp_min(0)) @ V
    return shrunk


def independent_columns(L: Tensor, tolerance: float) -> Tensor:
    """Indices of a maximal set of linearly independent columns, by QR with column pivoting."""
    from scipy.linalg import qr

    _, R, order = qr(L.detach().double().cpu().numpy(), mode="economic", pivoting=True)
    diagonal = torch.from_numpy(R).diagonal().abs()
    rank = int((diagonal > tolerance * diagonal.max()).sum()) if diagonal.max() > 0 else 0
    return torch.tensor(sorted(int(i) for i in order[:rank]), dtype=torch.long, device=L.device)


@register(
    "cllr",
    kind="regularizer",
    aliases=("low_dimensional_reconstruction",),
    weight=0.1,
    formula="R = mean_i || L^T L Phi(x_i) - Phi(x_i) ||^2 + alpha * norm(L), norm = l21 or nuclear",
    source="CLLR Eqs. 6-10, Algorithm 1; lambda = 0.1, alpha = 10",
    deviations={
        "CLLR": (
            "transpose marks are lost in Eqs. 6 and 7: L^T L is read, by Sec. 2.2",
            "L is started as the identity: the paper does not say",
            "solver=proximal is not in the paper: a subgradient reaches no exact zeros",
        ),
    },
    cost="rows x dim^2, and a singular value decomposition of L for the nuclear norm; no similarity matrix",
)
class CLLR(Objective):
    """Low-dimensional reconstruction: learns L so that embeddings survive L^T L while L loses columns or rank.

    Formula (CLLR Eqs. 6-8), Phi the embedding before normalisation, L in R^{H x H}:
        R = mean_i || L^T L Phi(x_i) - Phi(x_i) ||^2 + alpha * norm(L)
        norm: l21, the sum of the columns' L2 norms; nuclear, the sum of singular values

    Args:
        dim: H; taken from the first call (or `objective(..., dim=)`) when none.
        norm: "l21" (column-sparse L) or "nuclear" (low-rank L).
        alpha: weight of the norm, >= 0.
        solver: "subgradient" is the paper's; "proximal" leaves the norm out of the gradient and applies its proximal
            map after each optimizer step (`after_step`), which reaches exact zeros.

    Features for every downstream use are `transform(Phi)` = L Phi. L starts as the identity.
    """

    needs_negatives = False

    def __init__(
        self,
        dim: Annotated[int | None, Range(at_least=1), "width H of the embeddings"] = None,
        norm: Annotated[Literal["l21", "nuclear"], "column sparsity or low rank"] = "l21",
        alpha: Annotated[float, Range(at_least=0), "weight of the norm"] = 10.0,
        solver: Annotated[Literal["subgradient", "proximal"], "how the norm is minimised"] = "subgradient",
    ) -> None:
        super().__init__(None)
        self.norm = norm
        self.alpha = alpha
        self.solver = solver
        self.L = UninitializedParameter()
        if dim is not None:
            self.build(dim)

    def build(self, dim: int) -> None:
        self.materialize("L", (dim, dim), nn.init.eye_)

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        features = full_precision(rows.pairs.anchors)
        L = self.L.to(features.dtype)
        size = l21(L) if self.norm == "l21" else nuclear(L)
        if self.solver == "proximal":
            size = size.detach()
        return rows.mean_over_all(reconstruction(L, features)) + self.alpha * size

    @torch.no_grad()
    def after_step(self, learning_rate: float, weight: float) -> None:
        """Proximal map with threshold learning_rate * weight * alpha; nothing for the subgradient solver."""
        threshold = learning_rate * weight * self.alpha
        if self.solver != "proximal" or threshold == 0 or isinstance(self.L, UninitializedParameter):
            return
        self.L.copy_(shrink_columns(self.L, threshold) if self.norm == "l21" else shrink_spectrum(self.L, threshold))

    def transform(self, features: Tensor) -> Tensor:
        if isinstance(self.L, UninitializedParameter):
            return features
        return features @ self.L.detach().to(features).T

    @torch.no_grad()
    def kept_columns(self, tolerance: float = 1e-3) -> Tensor:
        """Indices of the columns of L that `prune` keeps."""
        if self.norm == "nuclear":
            return independent_columns(self.L, tolerance)
        norms = torch.linalg.vector_norm(self.L, dim=0)
        return torch.nonzero(norms > tolerance * norms.max()).flatten()

    @torch.no_grad()
    def prune(self, tolerance: float = 1e-3) -> Tensor:
        """The final projection L_hat.

        Args:
            tolerance: columns shorter than this share of the longest one count as zero, columns whose pivot in a
                rank-revealing QR is below this share of the largest one as dependent.

        Returns:
            l21: (H, n) with the zero columns dropped; nuclear: (H, H) with a maximal set of linearly independent
            columns kept and the others 0.
        """
        kept = self.kept_columns(tolerance)
        if self.norm == "l21":
            return self.L[:, kept].clone()
        pruned = torch.zeros_like(self.L)
        pruned[:, kept] = self.L[:, kept]
        return pruned

    @torch.no_grad()
    def summary(self) -> dict[str, float]:
        """Numbers to log: rank of L_hat and number of its non-zero columns."""
        pruned = self.prune()
        rank = float(torch.linalg.matrix_rank(pruned)) if pruned.numel() else 0.0
        return {"rank": rank, "columns": float(len(self.kept_columns()))}
