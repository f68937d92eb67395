"""The block loss of Arora et al. (their CURL): means of similar points instead of single points.

This is not the CURL agent of Laskin et al., which uses `infonce(similarity=bilinear, temperature=1)` in an RL agent.
"""

import math
from dataclasses import replace
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from dipole.core.objectives.checks import check_numbers, reads_at_once
from dipole.core.objectives.indices import is_listed
from dipole.core.objectives.objective import Objective, Rows
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.registry import register
from dipole.core.objectives.similarity import full_precision
from dipole.core.objectives.spec import Range
from dipole.core.objectives.statistics import AnyStatistic, Extreme, LogSumExp
from dipole.core.utils.errors import PairsError


@register(
    "blocks",
    aliases=("block", "arora"),
    formula="v_m = f(x)^T ( mean_i f(x_i^+) - mean_i f(x_mi^-) ); "
    "L = log2(1 + sum_m e^{-v_m}) or max(0, 1 + max_m -v_m)",
    source="Arora et al. 2019, Sec. 6.3, Eq. 12 (b = 1: Eqs. 4-6)",
    deviations={
        "Arora et al. 2019": (
            "logistic losses are to base 2, so that no separation costs 1, as Lemma 4.3 needs",
            "the theory bounds the norm of embeddings by R. The loss does not bound it, the encoder has to",
        )
    },
)
class Blocks(Objective):
    """Block contrast: a point against the mean of its own block and the means of other blocks.

    Formula (Arora et al., Eq. 12), m = 1..k negative blocks:
        v_m = f(x)^T ( (1/b) sum_{i=1..b} f(x_i^+) - (1/b) sum_{i=1..b} f(x_mi^-) )
        logistic: L = log2(1 + sum_m e^{-v_m});   hinge: L = max(0, 1 + max_m(-v_m))

    With `Pairs.from_blocks`, a block of b is x and its b positives. A negative block is the mean of b points of another
    block of the batch of all ranks: the positives of its first point. The k negative blocks of a point are drawn from
    the other blocks without replacement, again for every point and step. If the blocks' classes were drawn
    independently from rho, the k negatives have independent classes c_m^- ~ rho, as in Eq. 5. A block drawn twice would
    count one draw of a class twice. Class collision is 1 - (1 - 1/C)^k for C equally likely classes.

    Without blocks (views, a queue, windows), the block of an anchor is its positives. Its negative blocks are those of
    the other anchors that share no point with it. k selects the next ones in cyclic order and draws nothing. Embeddings
    are not normalised. Bound their norm by R in the encoder.

    Args:
        b: block size, the first b >= 1 positives of each point. None uses all. b = 1 is L_un (Eqs. 4-6).
        k: number of negative blocks, >= 1, one mean each. None uses all other blocks.
        loss: "logistic" (base 2, so that no separation costs 1) or "hinge".

    Raises:
        PairsError: if a point has fewer than b positives, or there are fewer than k other blocks. Anchors at the ends
            of documents of `Pairs.from_window` may have fewer positives.

    Relations: with one positive, `loss=logistic` equals `infonce(similarity=dot, temperature=1)` in bits, divided by
    ln 2. b = 1 is L_un of Eqs. 4-6.
    """

    def __init__(
        self,
        b: Annotated[int | None, Range(at_least=1), "block size, none for all positives"] = None,
        k: Annotated[int | None, Range(at_least=1), "negative blocks, drawn from the batch, none for all"] = None,
        loss: Annotated[Literal["logistic", "hinge"], "loss of the margins v"] = "logistic",
    ) -> None:
        super().__init__("dot")
        self.b = b
        self.k = k
        self.kind = loss

    def prepare(self, pairs: Pairs) -> Pairs:
        index = pairs.positives
        if self.b is not None:
            pairs.check_positives(
                self.b, lambda found: f"blocks(b={self.b}) needs {self.b} positives for each anchor, got {found}."
            )
            index = index[:, : self.b]
        if not index.shape[1]:
            return pairs  # no anchor has a block
        # Means of half-precision rows would lose bits that products of single rows retain.
        pairs = replace(pairs, anchors=full_precision(pairs.anchors), candidates=full_precision(pairs.candidates))
        if pairs.facts.of_block:
            return self._of_blocks(pairs, index)
        if pairs.facts.padded:
            listed = (index >= 0).unsqueeze(2)
            means = (pairs.candidates[index.clamp_min(0)] * listed).sum(1) / listed.sum(1).clamp_min(1)  # (A, d)
        else:
            points = pairs.candidates.index_select(0, index.flatten())
            means = points if index.shape[1] == 1 else points.unflatten(0, index.shape).mean(1)  # (A, d)
        own = torch.arange(len(index), device=index.device).unsqueeze(1)
        # A block with an excluded point is not a negative block.
        alone = pairs.first_negative > 0
        related = own if alone else related_blocks(pairs.excluded, index, len(pairs.candidates), pairs.facts.shared)
        ignored = torch.where(related == own, -1, related)
        if pairs.facts.padded:
            # An anchor without positives has no block, so its mean is not a candidate.
            has = (index >= 0).any(1)
            if reads_at_once(has):
                place = has.cumsum(0) - 1
                means, own = means[has], torch.where(has, place, -1).unsqueeze(1)
                ignored = torch.where(ignored < 0, -1, place[ignored])
            else:
                # Their number is not read from the device. They stay, and all anchors exclude them.
                everyone = own.T.expand(len(own), -1)
                own = torch.where(has.unsqueeze(1), own, -1)
                ignored = torch.cat([ignored, torch.where(has, -1, everyone)], 1)
        found = pairs.against(means, own, ignored, first_negative=len(means) if alone else 0, padded=True)
        if self.k is not None and not alone and len(means):
            # Check all ranks' anchors, because ranks must agree on whether to continue.
            free = torch.where(own.squeeze(1) >= 0, found.negative_counts, self.k)
            check_numbers(free, self.k, None, lambda low, high: self._too_few(low))
        return found

    def _of_blocks(self, pairs: Pairs, index: Tensor) -> Pairs:
        """Return means of each point's own positives, (A, d), which are no negatives, then one mean of each block."""
        facts, size = pairs.facts, pairs.facts.of_block
        own = torch.arange(len(index), device=index.device).unsqueeze(1)  # (A, 1)
        means = pairs.candidates[index].mean(1)
        others = means[::size]  # (n, d)
        if self.k is not None and len(others) - 1 < self.k:
            raise PairsError(self._too_few(len(others) - 1))
        block = len(means) + own // size
        known = {"first_negative": len(means), "of_block": size, "draw": facts.draw}
        return pairs.against(torch.cat([means, others]), own, block, **known)

    def _too_few(self, free: int) -> str:
        return (
            f"blocks(k={self.k}) needs {self.k} other blocks, an anchor has only {free}: use larger batches or a "
            "smaller k."
        )

    @property
    def positives_wanted(self) -> int | None:
        return self.b

    def statistics(self) -> dict[str, AnyStatistic]:
        if self.k is not None:
            return {}
        if self.kind == "logistic":
            return {"negatives": LogSumExp(1.0)}
        return {"nearest": Extreme()}

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        own = positive[:, 0]
        if self.k is not None:
            near = rows.similarity(self.negatives(rows.pairs, self.k))  # (A, k)
            if self.kind == "logistic":
                return logistic(torch.logsumexp(near, 1) - own)
            return hinge(near.amax(1) - own)
        if self.kind == "logistic":
            return logistic(rows.negatives - own)
        return hinge(rows.similarity(rows.nearest.unsqueeze(1)).squeeze(1) - own)

    @staticmethod
    def negatives(pairs: Pairs, k: int) -> Tensor:
        """Return the negatives of prepared pairs, (A, k) candidates: drawn from blocks, else the next ones."""
        if not pairs.facts.of_block:
            return next_blocks(pairs, k)
        return pairs.first_negative + drawn_blocks(
            pairs.positives.squeeze(1), pairs.first_negative, pairs.facts.of_block, k, pairs.facts.draw
        )


def drawn_blocks(points: Tensor, count: int, of_block: int, k: int, draw: int) -> Tensor:
    """Return numbers of negative blocks (A, k) of points (A,) among `count`, never their own, by the step's number."""
    other = distinct(points, count // of_block - 1, k, draw)
    return other + (other >= (points // of_block).unsqueeze(1))


def logistic(log_sum: Tensor) -> Tensor:
    """Return log2(1 + sum_m e^{-v_m}) from log sum_m e^{-v_m}."""
    return softplus(log_sum, threshold=50) / math.log(2)


def hinge(strongest: Tensor) -> Tensor:
    """Return max(0, 1 + max_m(-v_m)) from max_m(-v_m)."""
    return (1 + strongest).clamp_min(0)


def related_blocks(excluded: Tensor, positives: Tensor, candidates: int, shared: int | None = None) -> Tensor:
    """Return the anchors, (A, n), whose block has a point that is excluded for the row's anchor. -1 pads.

    `positives` (A, b) are the blocks, and `shared` is the largest number of blocks of a point. None waits for the
    device.
    """
    points = torch.where(positives < 0, candidates, positives).flatten()  # padding behind all candidates
    order = points.argsort(stable=True)
    owners = order.div(positives.shape[1], rounding_mode="floor")  # anchors sorted by the point in their block
    sizes = torch.zeros(candidates + 1, dtype=torch.long, device=points.device)
    sizes = sizes.scatter_add(0, points, torch.ones_like(points))[:-1]
    starts = sizes.cumsum(0) - sizes
    point = excluded.clamp_min(0).unsqueeze(2)  # (A, E, 1)
    most = int(sizes.max()) if shared is None else shared
    offset = torch.arange(max(1, most), device=positives.device)
    there = (excluded.unsqueeze(2) >= 0) & (offset < sizes[point])
    return torch.where(there, owners[(starts[point] + offset).clamp_max(len(owners) - 1)], -1).flatten(1)


def next_blocks(pairs: Pairs, k: int) -> Tensor:
    """Return the next k blocks, (A, k), in cyclic order that share no point with the anchor's own."""
    count = len(pairs.candidates)
    reach = min(count - 1, k + pairs.ignored.shape[1])
    own = pairs.positives.clamp_min(0)  # (A, 1)
    ahead = (own + torch.arange(1, reach + 1, device=own.device)) % count  # (A, reach)
    taken = is_listed(ahead, pairs.ignored)
    return ahead.gather(1, taken.long().argsort(dim=1, stable=True)[:, :k])


# Random choices without a generator: the same on every device and on any number of ranks.
# A choice is a hash of its arguments, so nothing is read back from the device.

# Constants of splitmix64 (Steele, Lea, Flood 2014) as signed integers. Products wrap around.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
FIRST = 0xBF58476D1CE4E5B9 - 2**64
SECOND = 0x94D049BB133111EB - 2**64


def scrambled(numbers: Tensor) -> Tensor:
    """Apply the output function of splitmix64 to 64-bit integers."""
    numbers = (numbers ^ _right(numbers, 30)) * FIRST
    numbers = (numbers ^ _right(numbers, 27)) * SECOND
    return numbers ^ _right(numbers, 31)


def distinct(places: Tensor, among: int, count: int, draw: int) -> Tensor:
    """Return numbers below `among`, (A, count), different within a row, with every set equally likely.

    Rows are drawn independently of one another (Floyd's sampling on hashes of `draw`, the row's place and the column).
    """
    start = scrambled(places * GOLDEN + scrambled(torch.full_like(places, draw % 2**63)))  # (A,)
    column = torch.arange(count, device=places.device)
    last = among - count + column  # (count,)
    # Use the lower 63 bits. The remainder is then uniform in practice.
    chosen = (scrambled(start.unsqueeze(1) + (column + 1) * GOLDEN) & (2**63 - 1)) % (last + 1)  # (A, count)
    for at in range(1, count):
        taken = (chosen[:, :at] == chosen[:, at : at + 1]).any(1)
        chosen[:, at] = torch.where(taken, last[at], chosen[:, at])
    return chosen


def _right(numbers: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros, since >> of a negative number fills with ones."""
    shifted: Tensor = (numbers >> bits) & (2 ** (64 - bits) - 1)
    return shifted
