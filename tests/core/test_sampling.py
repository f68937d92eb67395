"""Blocks of one class: who is in them, how many, and what they depend on."""

import numpy as np
import pytest

from dipole.core.ground.errors import DataError
from dipole.core.ground.seeding import Seeds
from dipole.core.train.sampling import ClassBlocks

LABELS = np.repeat([5, 0, 2, 9], [7, 4, 9, 2])


@pytest.mark.parametrize("count", [None, 1, 5])
@pytest.mark.parametrize("size", [2, 3])
def test_a_block_is_different_rows_of_one_class(size, count):
    blocks = ClassBlocks(LABELS, size, count, Seeds(0))
    for epoch in range(3):
        rows = blocks.rows(epoch)
        assert len(rows) == len(blocks)
        for block in rows.reshape(-1, size):
            assert len(set(LABELS[block])) == 1
            assert len(set(block)) == size


def test_without_a_count_every_row_that_fits_comes_once():
    blocks = ClassBlocks(LABELS, 2, None, Seeds(0))
    assert len(blocks) == 6 + 4 + 8 + 2
    rows = blocks.rows(0)
    assert len(set(rows)) == len(rows) == 20
    # A class of 7 leaves one out, in every epoch another one.
    left_out = {(set(range(7)) - set(blocks.rows(epoch))).pop() for epoch in range(40)}
    assert left_out == set(range(7))


def test_counted_blocks_are_drawn_once_and_use_rows_evenly():
    blocks = ClassBlocks(LABELS, 2, 6, Seeds(0))
    first, second = (blocks.rows(epoch).reshape(-1, 2) for epoch in (0, 1))
    assert not np.array_equal(first, second)
    assert sorted(map(tuple, first)) == sorted(map(tuple, second))
    used = np.bincount(first.ravel(), minlength=len(LABELS))
    for label in np.unique(LABELS):
        assert len([b for b in first if LABELS[b[0]] == label]) == 6
        mine = used[label == LABELS]
        assert mine.max() - mine.min() <= 2
    assert not np.array_equal(first, ClassBlocks(LABELS, 2, 6, Seeds(1)).rows(0).reshape(-1, 2))


def test_small_classes_are_left_out_and_none_is_an_error():
    assert set(LABELS[ClassBlocks(LABELS, 5, None, Seeds(0)).rows(0)]) == {5, 2}
    with pytest.raises(DataError, match="10 members for a block, at most 9"):
        ClassBlocks(LABELS, 10, 3, Seeds(0))
