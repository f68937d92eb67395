"""Facts about the indices of pairs, so that values need not be read back from the device."""

from dataclasses import dataclass

NO_VIEW = -1
"""The view number of candidates outside the batch, such as the rows of a queue."""

Runs = tuple[tuple[int, int], ...]
"""View and length of each run of rows. Every run goes through the batch once."""


@dataclass(frozen=True)
class PairLayout:
    """Facts about the indices of `Pairs`.

    Args:
        anchor_views: runs of the anchors.
        candidate_views: runs of the candidates.
        first_negative: candidates before this index are positives of some anchor and never negatives.
        among: number of anchors, the first ones, that are also candidates.
        fewest: number of positives that every anchor has. None if unknown. At the end of a document a neighbour may be
            missing.
        padded: -1 may occur among positives or ignored candidates, or a candidate may be listed twice.
        mutual: anchors are candidates, and i excludes j exactly if j excludes i.
        shared: a candidate is a positive of at most this many anchors. None if unknown.
        queue: number of candidates outside the batch: past embeddings or hard negatives. They follow the candidates of
            the batch.
        queue_of_keys: the encoder of the keys made the queue. Otherwise the anchors' encoder made it, or a copy of it.
        sides: anchors and candidates are two views from two encoders, and an anchor's own side is ignored.
        by_label: positives are rows of the same class.
        of_block: number of anchors from each block, block after block. 0 without blocks.
        draw: seed of random choices among blocks, the same on every rank.
    """

    anchor_views: Runs
    candidate_views: Runs
    first_negative: int = 0
    among: int = 0
    fewest: int | None = None
    padded: bool = False
    mutual: bool = False
    shared: int | None = None
    queue: int = 0
    queue_of_keys: bool = False
    sides: bool = False
    by_label: bool = False
    of_block: int = 0
    draw: int = 0
