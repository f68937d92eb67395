"""Low-dimensional reconstruction: a sparse or low-rank projection through which embeddings must be recoverable."""

import math
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from dipole.core.objectives.objective import Objective, Rows
from dipole.core.objectives.registry import register
from dipole.core.objectives.similarity import full_precision, normalize
from dipole.core.objectives.spec import LATER, Range
from dipole.core.objectives.spectrum import converged, distance_from_identity, effective_rank, singular_values
from dipole.core.utils.errors import OptionError

OF_ONE_FORM = dict.fromkeys(("norm", "alpha", "solver", "features", "tolerance"), "printed") | {"rank": "released"}
"""Options that only one form has."""
VANISHED = 0.1
"""L has vanished if no singular value is above this. At stationary points of R, non-zero ones are above 0.577."""
IDENTITY = 0.05  # L counts as a multiple of the identity if || L - c I || / || L || is below this


def reconstruction(L: Tensor, features: Tensor) -> Tensor:
    """Return || L^T L Phi - Phi ||^2 of each row, (A,)."""
    return (features @ L.T @ L - features).square().sum(1)


def unit_reconstruction(L: Tensor, features: Tensor) -> Tensor:
    """Return || n(Phi) - n(L^T L Phi) ||_F / B of one view's features (B, H), (). n scales rows to unit length."""
    unit = normalize(features)
    length: Tensor = torch.linalg.vector_norm(unit - normalize(unit @ L.T @ L))
    return length / len(features)


def survives_above(alpha: float) -> float:
    """Return the energy E (v . Phi)^2 below which a direction v is lost, 3 sqrt(3) / 8 alpha.

    Along an eigenvector of E Phi Phi^T with eigenvalue s, a singular value l of L costs s (1 - l^2)^2 + alpha l. This
    is stationary at 0 and where 4 s l (1 - l^2) = alpha. The second has a solution only for s >= 3 sqrt(3) / 8 alpha,
    and the greater one is at l >= 1 / sqrt(3). The energies sum to E |Phi|^2, so at most
    E |Phi|^2 / survives_above(alpha) directions survive.
    """
    return 3 * math.sqrt(3) / 8 * alpha


def l21(L: Tensor) -> Tensor:
    """Return the sum of the L2 norms of the columns."""
    size: Tensor = torch.linalg.vector_norm(L, dim=0).sum()
    return size


def nuclear(L: Tensor) -> Tensor:
    """Return the sum of the singular values."""
    size: Tensor = converged(torch.linalg.svdvals, L).sum()
    return size.to(L.dtype)


def shrink_columns(L: Tensor, threshold: float) -> Tensor:
    """Apply the proximal map of threshold * l21: shorten each column by the threshold, short ones to zero."""
    norms: Tensor = torch.linalg.vector_norm(L, dim=0)
    return L * (1 - threshold / norms.clamp_min(threshold)).clamp_min(0)


def shrink_spectrum(L: Tensor, threshold: float) -> Tensor:
    """Apply the proximal map of threshold * nuclear: lower singular values by the threshold, small ones to zero."""
    U, S, V = converged(lambda matrix: torch.linalg.svd(matrix, full_matrices=False), L)
    shrunk: Tensor = (U * (S - threshold).clamp_min(0)) @ V
    return shrunk.to(L.dtype)


def independent_columns(L: Tensor, tolerance: float) -> Tensor:
    """Return the indices of a maximal set of linearly independent columns, by QR with column pivoting.

    A column is dependent if its distance from the span of earlier columns is at most the tolerance.
    """
    from scipy.linalg import qr

    _, R, order = qr(L.detach().cpu().double().numpy(), mode="economic", pivoting=True)
    diagonal = torch.from_numpy(R).diagonal().abs()
    rank = int((diagonal > tolerance).sum())
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
            "transpose marks are missing in Eqs. 6 and 7: we read L^T L, by Sec. 2.2",
            "L starts as the identity: the paper does not state its start",
            "solver=proximal is not in the paper: a subgradient reaches no exact zeros",
            "features=unit is not in the printed equations. The authors' code scales features to unit length. At the "
            "paper's alpha, L vanishes or stays a multiple of the identity",
            "the first author's code is another method than the equations: variant=released. The default is printed",
            "the paper does not define a zero column: here, not above an absolute tolerance",
        )
    },
    cost="rows x dim^2, and a singular value decomposition of L for the nuclear norm, no similarity matrix",
)
class CLLR(Objective):
    """Low-dimensional reconstruction: learns L so that embeddings survive L^T L while L loses columns or rank.

    Formula (CLLR Eqs. 6-8), Phi the embedding before normalisation, L in R^{H x H}:
        R = mean_i || L^T L Phi(x_i) - Phi(x_i) ||^2 + alpha * norm(L)
        norm: l21 is the sum of the columns' L2 norms, nuclear the sum of singular values
    variant=released (functioncs/CLLR), Phi_v the encoder's features of view v, (B, H), L in R^{rank x H}:
        R = sum_v || n(Phi_v) - n(L^T L n(Phi_v)) ||_F / B,   n scales rows to unit length

    Args:
        dim: H >= 1. None takes it from the first call (or `objective(..., dim=)`).
        norm: "l21" (column-sparse L) or "nuclear" (low-rank L).
        alpha: weight of the norm, >= 0. The nuclear norm loses the directions of Phi whose energy is below 0.65 alpha
            (`survives_above`), and l21 is never less. Compare alpha with the mean |Phi|^2.
        solver: "subgradient" is the paper's. "proximal" takes no gradient of the norm and applies its proximal map
            after each optimizer step (`after_step`), which reaches exact zeros. Its threshold is that of plain gradient
            descent. Under an optimizer that scales gradients (Adam), the norm has a different weight.
        features: the reconstructed features. "raw" is the paper's Phi. A loss of dot products fixes its scale. A loss
            of cosines leaves it free, and Phi may shrink until L vanishes. "unit" is Phi / |Phi|, of energy 1. The
            nuclear norm then retains at most 1.54 / alpha directions, for any scale.
        tolerance: columns, pivots and singular values of L up to this count as zero. Absolute, >= 0.
        variant: "printed" is the paper's equations. "released" is the authors' code: it acts on the encoder's features,
            also where the loss has the output of a head, of all views. Nothing is squared, and there is no norm of L.
        rank: rows of the released form's L, >= 1.

    Raises:
        PairsError: if the width of the embeddings changes.
        OptionError: if L would not fit into memory, or an option is given that the form does not have. The released one
            has dim and rank, the printed one all others.

    Use `transform(Phi)` = L Phi as features downstream. L starts as the identity. The released form projects nothing
    downstream, and L starts from a standard normal draw.

    Relations: at alpha = 0 the identity, from which L starts, reconstructs everything, so R = 0 at every step. l21 is
    never less than the nuclear norm.
    """

    needs_negatives = False

    def __init__(
        self,
        dim: Annotated[int | None, Range(at_least=1), "width H of the embeddings"] = None,
        norm: Annotated[Literal["l21", "nuclear"], "column sparsity or low rank"] = "l21",
        alpha: Annotated[float, Range(at_least=0), "weight of the norm"] = 10.0,
        solver: Annotated[Literal["subgradient", "proximal"], "how the norm is minimised"] = "subgradient",
        features: Annotated[Literal["raw", "unit"], "Phi as it is, or at length 1"] = "raw",
        tolerance: Annotated[float, Range(at_least=0), "parts of L that are not above it count as zero"] = 0.01,
        variant: Annotated[Literal["printed", "released"], "the paper's equations, or the authors' code", LATER] = (
            "printed"
        ),
        rank: Annotated[int, Range(at_least=1), "rows of L, released form", LATER] = 512,
    ) -> None:
        super().__init__(None)
        for name in self.given:
            if OF_ONE_FORM.get(name, variant) != variant:
                raise OptionError(
                    f"cllr: {name} is of variant={OF_ONE_FORM[name]}, and this is variant={variant}. Remove {name}, or "
                    f"write variant={OF_ONE_FORM[name]}.",
                    name,
                )
        self.variant = variant
        self.rank = rank
        self.norm = norm
        self.alpha = alpha
        self.solver = solver
        self.needs_learning_rate = solver == "proximal"
        self.on_features = variant == "released"
        self.weighting = None if variant == "released" else "rows"  # released: a sum over all rows
        self.features = features
        self.tolerance = tolerance
        self.L = UninitializedParameter()
        if dim is not None:
            self.build(dim)

    def build(self, dim: int) -> None:
        if self.variant == "released":
            self.materialize("L", (self.rank, dim), nn.init.normal_)
        else:
            self.materialize("L", (dim, dim), nn.init.eye_)

    def reconstructed(self, embeddings: Tensor) -> Tensor:
        """Return what L^T L has to reconstruct, (A, H): Phi, or Phi / |Phi|."""
        wide = full_precision(embeddings)
        if self.features == "unit":
            return normalize(wide)
        return wide

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        if self.variant == "released":
            # Every rank has the features of all ranks, and computes the same sum.
            return torch.stack([unit_reconstruction(self.L.to(view.dtype), view) for view in rows.features]).sum()
        features = self.reconstructed(rows.pairs.anchors)
        L = self.L.to(features.dtype)
        size = self.size(L)
        if self.solver == "proximal":
            size = size.detach()
        return rows.mean_over_all(reconstruction(L, features)) + self.alpha * size

    def size(self, L: Tensor) -> Tensor:
        """Return norm(L) of the formula."""
        return {"l21": l21, "nuclear": nuclear}[self.norm](L)

    @torch.no_grad()
    def after_step(
        self, learning_rate: float, weight: float, step: int | None = None, total: int | None = None
    ) -> None:
        """Apply the proximal map with threshold learning_rate * weight * alpha. The subgradient solver does nothing."""
        threshold = learning_rate * weight * self.alpha
        if self.solver != "proximal" or threshold == 0 or isinstance(self.L, UninitializedParameter):
            return
        shrink = {"l21": shrink_columns, "nuclear": shrink_spectrum}[self.norm]
        self.L.copy_(shrink(self.L, threshold))

    def transform(self, features: Tensor) -> Tensor:
        if self.variant == "released" or isinstance(self.L, UninitializedParameter):
            return features
        return features @ self.L.detach().to(features).T

    @torch.no_grad()
    def kept_columns(self) -> Tensor:
        """Return the indices of the columns of L that `prune` retains."""
        if self.norm == "nuclear":
            return independent_columns(self.L, self.tolerance)
        return torch.nonzero(torch.linalg.vector_norm(self.L, dim=0) > self.tolerance).flatten()

    @torch.no_grad()
    def prune(self) -> Tensor:
        """Return the final projection L_hat. The released form has none: L itself is returned.

        Columns count as zero if they are not longer than the tolerance, and as dependent if their pivot in a rank-
        revealing QR is not above it. l21: (H, n) without the zero columns. nuclear: (H, H) with a maximal set of
        linearly independent columns, and the others 0.
        """
        if self.variant == "released":
            return self.L.clone()
        kept = self.kept_columns()
        if self.norm == "l21":
            return self.L[:, kept].clone()
        pruned = torch.zeros_like(self.L)
        pruned[:, kept] = self.L[:, kept]
        return pruned

    @torch.no_grad()
    def summary(self) -> dict[str, float]:
        """Return numbers of L to log, or none before L has a width.

        rank: singular values of L_hat above the tolerance. columns: those that `prune` retains, non-zero ones for l21.
        effective_rank: exp of the entropy of L's singular values above the tolerance, as shares. norm: the norm that
        alpha weighs. frobenius, spectral: L's Frobenius norm and largest singular value. from_identity:
        || L - c I || / || L ||. The released form has neither columns, norm nor from_identity.
        """
        if isinstance(self.L, UninitializedParameter):
            return {}
        values = singular_values(self.L)
        if self.variant == "released":
            return {
                "rank": float((values > self.tolerance).sum()),
                "effective_rank": effective_rank(self.L, self.tolerance),
                "frobenius": float(torch.linalg.matrix_norm(self.L)),
                "spectral": float(values[0]),
            }
        pruned = self.prune()
        return {
            "rank": float((singular_values(pruned) > self.tolerance).sum()),
            "columns": float(pruned.norm(dim=0).count_nonzero()),
            "effective_rank": effective_rank(self.L, self.tolerance),
            "norm": float(self.size(self.L)),
            "frobenius": float(torch.linalg.matrix_norm(self.L)),
            "spectral": float(values[0]),
            "from_identity": distance_from_identity(self.L),
        }

    @torch.no_grad()
    def measure(self, embeddings: Tensor) -> dict[str, float]:
        """Return numbers of L on embeddings Phi (n, H) to log. Phi has length 1 with `features=unit`.

        error: sum |L^T L Phi - Phi|^2 / sum |Phi|^2, 0 if nothing is lost and 1 if everything is. energy: mean
        |Phi|^2, for comparison with alpha. data_rank, data_effective_rank: of the rows L Phi, singular values
        over sqrt(n) that are above the tolerance (the root mean square along a direction) and exp of their entropy.
        Empty before L has a width, and for the released form, which does not act on embeddings.
        """
        if self.variant == "released" or isinstance(self.L, UninitializedParameter):
            return {}
        features = self.reconstructed(embeddings.to(self.L.device))
        L = self.L.to(features.dtype)
        energy = features.square().sum()
        projected = features @ L.T / math.sqrt(max(1, len(features)))
        return {
            "error": float(reconstruction(L, features).sum() / energy),
            "energy": float(energy / max(1, len(features))),
            "data_rank": float((singular_values(projected) > self.tolerance).sum()),
            "data_effective_rank": effective_rank(projected, self.tolerance),
        }

    def remarks(self) -> list[str]:
        """Return a warning if L of the printed form has vanished or is a multiple of the identity."""
        found = self.summary()
        if not found or self.variant == "released":
            return []
        if found["spectral"] <= VANISHED:
            return [
                f"L has vanished (no singular value above {VANISHED:g}): alpha is too large for the energy of the "
                "features. Lower alpha, or use features=unit with alpha below 1"
            ]
        if len(self.L) > 1 and found["from_identity"] <= IDENTITY:
            return [
                f"L is a multiple of the identity (within {IDENTITY:g} of its norm): L Phi has the dimension of Phi. "
                "Train longer, or change alpha: directions of the features are lost whose energy is below 0.65 alpha"
            ]
        return []
