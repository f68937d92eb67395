"""Approximate inverses of the Hessians of many logistic regressions that share their features."""

import copy
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

SHARED_ABOVE = 16  # classes above which one factor serves all: 100 of their own cost more than they save
PLAIN_ABOVE = 300  # classes above which no factor follows what bends
WEIGHED_BELOW = 1000  # features below which each row's own curvature is worth a product of the features
FACTORED_BELOW = 3000  # features above which factors cost more than the iterations that they save
ALIKE = 3.0  # times, at most, that the curvatures of two values of C which one factor serves differ in any direction
RANK = 200  # of the part of a wide Gram matrix that is inverted
STRIPS = 4


class Preconditioner(Protocol):
    """Applied to vectors (K, Q, D); `scaled`: whether steps of length one are about right."""

    scaled: bool

    def __call__(self, vectors: Tensor) -> Tensor: ...

    def take(self, kept: Tensor) -> "Preconditioner":
        """The same for those columns (Q,) alone."""
        ...

    def repeat(self, times: int) -> "Preconditioner":
        """The same for each column so many times."""
        ...


class Curvature:
    """Products of the features with themselves, each made once."""

    def __init__(self, x: Tensor) -> None:
        self.x = x  # (N, D)
        self._gram: Tensor | None = None
        self._least: float | None = None
        self._top: tuple[Tensor, Tensor, Tensor] | None = None

    def gram(self) -> Tensor:
        """X^T X (D, D)."""
        if self._gram is None:
            self._gram = self.weighed(None)
        return self._gram

    def least(self) -> float:
        """The least pivot of X^T X without the constant, somewhat above its least eigenvalue; 0 where it has none."""
        if self._least is None:
            factor, failed = torch.linalg.cholesky_ex(self.gram()[:-1, :-1])
            self._least = 0.0 if int(failed) else float(factor.diagonal().min()) ** 2
        return self._least

    def weighed(self, weights: Tensor | None) -> Tensor:
        """X^T diag(weights) X (D, D), its upper blocks computed and mirrored."""
        x = self.x
        left = x if weights is None else x * weights[:, None]
        out = x.new_empty(x.shape[1], x.shape[1])
        size = -(-x.shape[1] // STRIPS)
        for start in range(0, x.shape[1], size):
            block = left[:, start : start + size].T @ x[:, start:]
            out[start : start + size, start:] = block
            out[start:, start : start + size] = block.T
        return out

    def top(self) -> tuple[Tensor, Tensor, Tensor]:
        """Squared lengths of the features (D,), and eigenvectors (D, R) and -values (R,) of their correlations."""
        if self._top is None:
            lengths = torch.linalg.vecdot(self.x.T, self.x.T)
            scale = torch.where(lengths > 0, lengths, 1.0).rsqrt()
            generator = torch.Generator(self.x.device).manual_seed(0)
            rank = min(RANK, *self.x.shape)
            sketch = torch.randn(self.x.shape[1], rank, generator=generator, device=self.x.device).to(self.x)
            basis = torch.linalg.qr(scale[:, None] * (self.x.T @ (self.x @ (scale[:, None] * sketch))))[0]
            image = self.x @ (scale[:, None] * basis)
            values, vectors = torch.linalg.eigh(image.T @ image)
            self._top = lengths, basis @ vectors, values.clamp_min(0)
        return self._top


def preconditioner(
    curvature: Curvature,
    probabilities: Callable[[], Tensor],
    classes: int,
    c: Tensor,
    ridge: Tensor,
    slow: bool = False,
) -> Preconditioner:
    """What fits the number of features and classes.

    Args:
        probabilities: gives those of every row, (V, K, N), at the V different values of C; asked for where they count.
        classes: K.
        c: (Q,) C of every column, equal ones side by side.
        ridge: (D,) weight of each feature's square.
        slow: whether the iteration has shown to need a better one.
    """
    values, counts = c.unique_consecutive(return_counts=True)
    if classes > PLAIN_ABOVE:
        return Plain(curvature, classes, values, counts)
    if curvature.x.shape[1] > FACTORED_BELOW:
        return Spectral(curvature, probabilities(), values, counts, ridge)
    return Factored(curvature, probabilities(), values, counts, ridge, slow)


class Factored:
    """Cholesky factors of c X^T diag(m) X + ridge for each C, one for each direction of the classes.

    The Hessian of a softmax is sum_n (diag(p_n) - p_n p_n^T) (x) x_n x_n^T. In the eigenvectors u of its mean over the
    rows, classes that are taken for each other become a direction of their own, and what is left beside the blocks
    u^T (diag(p_n) - p_n p_n^T) u is small. Where the data bend far more than the ridge, a larger C is the same factor
    scaled.
    """

    scaled = True

    def __init__(
        self, curvature: Curvature, probabilities: Tensor, values: Tensor, counts: Tensor, ridge: Tensor, slow: bool
    ) -> None:
        by_row = slow or len(curvature.x[0]) <= WEIGHED_BELOW
        turned = [_directions(p) for p in probabilities]
        levels = [c * bends.mean(1).clamp_min(1e-6) for c, (_, bends) in zip(values, turned, strict=True)]
        uneven = [[by_row and _uneven(bend) for bend in bends] for _, bends in turned]
        groups = [[place] for place in range(len(values))]
        if len(values) > 1 and len(levels[0]) == 1 and not any(each[0] for each in uneven):
            groups = _alike([float(level) for level in levels], curvature.least())
        self.counts = [int(counts[group].sum()) for group in groups]
        self.rotations = [turned[group[0]][0] for group in groups]
        self.factors: list[list[Tensor]] = []
        scale = values.new_ones(len(values))
        for group in groups:
            middle = (levels[group[0]] * levels[group[-1]]).sqrt()
            scale[group] = torch.stack([(middle / levels[place]).mean() for place in group])
            factors = []
            for bend, level, weigh in zip(turned[group[0]][1], middle.tolist(), uneven[group[0]], strict=True):
                hessian = curvature.weighed(bend).mul_(values[group[0]]) if weigh else curvature.gram() * level
                hessian.diagonal().add_(ridge + 1e-6)
                factors.append(_cholesky(hessian))
            self.factors.append(factors)
        self.scale = scale.repeat_interleave(counts)[:, None]  # (Q, 1)

    def __call__(self, vectors: Tensor) -> Tensor:
        out = []
        for part, rotation, factors in zip(vectors.split(self.counts, 1), self.rotations, self.factors, strict=True):
            flat = part.reshape(len(part), -1)
            turned = flat if rotation is None else rotation.T @ flat
            turned = turned.view(-1, *part.shape[1:])
            if len(factors) == 1:
                solved = _solve(turned.reshape(-1, part.shape[-1]), factors[0]).view_as(turned)
            else:
                solved = torch.stack([_solve(v, factor) for v, factor in zip(turned, factors, strict=True)])
            back = solved.reshape(len(solved), -1)
            out.append((back if rotation is None else rotation @ back).view_as(part))
        return (torch.cat(out, 1) if len(out) > 1 else out[0]) * self.scale

    def take(self, kept: Tensor) -> "Factored":
        part = object.__new__(Factored)
        left = [int(each.sum()) for each in kept.split(self.counts)]
        there = [i for i, count in enumerate(left) if count]
        part.counts = [left[i] for i in there]
        part.rotations = [self.rotations[i] for i in there]
        part.factors = [self.factors[i] for i in there]
        part.scale = self.scale[kept]
        return part

    def repeat(self, times: int) -> "Factored":
        part = copy.copy(self)
        part.counts = [times * count for count in self.counts]
        part.scale = self.scale.repeat_interleave(times, 0)
        return part


class Plain:
    """One number for each C: of many classes each bends at points of its own, which no shared factor follows."""

    scaled = False

    def __init__(self, curvature: Curvature, classes: int, values: Tensor, counts: Tensor) -> None:
        # A class bends as if its own points were at even odds, along their longest direction.
        length = torch.linalg.vecdot(curvature.x, curvature.x).mean()
        own = len(curvature.x) / classes
        self.scale = (1 / (1 + values * (own * length / 4))).repeat_interleave(counts)[:, None]  # (Q, 1)

    def __call__(self, vectors: Tensor) -> Tensor:
        out: Tensor = vectors * self.scale
        return out

    def take(self, kept: Tensor) -> "Plain":
        part = object.__new__(Plain)
        part.scale = self.scale[kept]
        return part

    def repeat(self, times: int) -> "Plain":
        part = copy.copy(self)
        part.scale = self.scale.repeat_interleave(times, 0)
        return part


class Spectral:
    """Scaling of each feature, and the inverse on the leading eigenvectors of the scaled Gram matrix.

    For more features than can be factored: P^-1 = S (I + U (diag(1 / l) - I) U^T) S.
    """

    scaled = False

    def __init__(
        self, curvature: Curvature, probabilities: Tensor, values: Tensor, counts: Tensor, ridge: Tensor
    ) -> None:
        lengths, self.vectors, eigenvalues = curvature.top()
        bends = (probabilities * (1 - probabilities)).mean((1, 2))  # (V,)
        data = values[:, None] * bends[:, None] * lengths
        whole = data + ridge + 1e-6
        share = (data / whole).mean(1, keepdim=True)
        least = share * eigenvalues[0] + 1 - share
        inner = least / (share * eigenvalues + 1 - share) - 1
        self.scale = whole.rsqrt().repeat_interleave(counts, 0)  # (Q, D)
        self.inner = inner.repeat_interleave(counts, 0)  # (Q, R)

    def __call__(self, vectors: Tensor) -> Tensor:
        scaled = vectors * self.scale
        return (scaled + ((scaled @ self.vectors) * self.inner) @ self.vectors.T) * self.scale

    def take(self, kept: Tensor) -> "Spectral":
        part = object.__new__(Spectral)
        part.vectors, part.scale, part.inner = self.vectors, self.scale[kept], self.inner[kept]
        return part

    def repeat(self, times: int) -> "Spectral":
        part = copy.copy(self)
        part.scale, part.inner = self.scale.repeat_interleave(times, 0), self.inner.repeat_interleave(times, 0)
        return part


def _directions(p: Tensor) -> tuple[Tensor | None, Tensor]:
    """Directions of the classes (K, K-1), and the curvature of the rows (K-1, N) along each; p (K, N)."""
    if len(p) == 1:
        return None, p * (1 - p)
    if len(p) > SHARED_ABOVE:
        return None, (p * (1 - p)).mean(0, keepdim=True)
    mean = (torch.diag(p.mean(1)) - p @ p.T / p.shape[1]).double()
    # Nothing bends along (1, ..., 1), and no gradient lies there.
    ones = torch.ones(len(p), 1).to(mean)
    contrasts = torch.linalg.qr(torch.cat([ones, torch.eye(len(p), len(p) - 1).to(mean)], 1))[0][:, 1:]
    directions = (contrasts @ torch.linalg.eigh(contrasts.T @ mean @ contrasts)[1]).to(p)
    return directions, directions.T.square() @ p - (directions.T @ p).square()


def _alike(levels: list[float], least: float) -> list[list[int]]:
    """Places of ascending levels l in groups whose l G + 1 are nearly in proportion, of G's least eigenvalue."""
    groups = [[0]]
    for place, level in enumerate(levels[1:], 1):
        first = levels[groups[-1][0]]
        if level >= first and least + 1 / first <= ALIKE * (least + 1 / level):
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups


def _uneven(bend: Tensor) -> bool:
    """Whether rows bend (N,) by more than a tenth otherwise than their mean."""
    mean = bend.mean()
    return float((bend - mean).abs().max()) > 0.1 * float(mean)


def _solve(rows: Tensor, factor: Tensor) -> Tensor:
    return torch.cholesky_solve(rows.T, factor).T


def _cholesky(hessian: Tensor) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(hessian)
    if int(failed):
        jitter = 1e-6 * hessian.diagonal().max().double()
        factor = torch.linalg.cholesky(hessian.double() + jitter * torch.eye(len(hessian)).to(jitter))
    out: Tensor = factor.to(hessian)
    return out
