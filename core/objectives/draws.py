"""Random choices that depend on numbers alone: the same on every device and on every number of ranks.

No generator holds a state and nothing is read back from the device: a choice is a hash of what it is made for.
"""

import torch
from torch import Tensor

# The constants of splitmix64 (Steele, Lea, Flood 2014), as signed integers; products wrap around.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
FIRST = 0xBF58476D1CE4E5B9 - 2**64
SECOND = 0x94D049BB133111EB - 2**64


def scrambled(numbers: Tensor) -> Tensor:
    """The output function of splitmix64 on 64-bit integers."""
    numbers = (numbers ^ _right(numbers, 30)) * FIRST
    numbers = (numbers ^ _right(numbers, 27)) * SECOND
    return numbers ^ _right(numbers, 31)


def distinct(places: Tensor, among: int, count: int, draw: int) -> Tensor:
    """(A, count) numbers below `among`, different in a row: every set of them is equally likely.

    Rows are drawn independently of one another (Floyd's sampling on hashes of draw, place and column).

    Args:
        places: (A,) int64, what each row is drawn for.
        among: numbers to choose from, at least `count`.
        count: numbers of a row.
        draw: another number gives another draw.
    """
    start = scrambled(places * GOLDEN + scrambled(torch.full_like(places, draw % 2**63)))  # (A,)
    column = torch.arange(count, device=places.device)
    last = among - count + column  # (count,)
    # The lower 63 bits: over so many, the remainder favours no number measurably.
    chosen = (scrambled(start.unsqueeze(1) + (column + 1) * GOLDEN) & (2**63 - 1)) % (last + 1)  # (A, count)
    for at in range(1, count):
        taken = (chosen[:, :at] == chosen[:, at : at + 1]).any(1)
        chosen[:, at] = torch.where(taken, last[at], chosen[:, at])
    return chosen


def _right(numbers: Tensor, bits: int) -> Tensor:
    """A shift that draws zeros in from the left; >> of a negative number draws ones."""
    shifted: Tensor = (numbers >> bits) & (2 ** (64 - bits) - 1)
    return shifted
