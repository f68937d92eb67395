"""Blocks of one class: who is in them, how many, and what they depend on."""

import numpy as np
import pytest

from dipole.core.train.class_blocks import ClassBlocks
from dipole.core.utils.errors import DataError
from dipole.core.utils.seeding import Seeds

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


def test_without_a_count_rows_are_used_up_before_they_come_again():
    blocks = ClassBlocks(LABELS, 2, None, Seeds(0))
    assert len(blocks) == 6 + 4 + 8 + 2
    left_out = set()
    for epoch in range(60):
        mine = blocks.rows(epoch).reshape(-1, 2)
        mine = mine[LABELS[mine[:, 0]] == 5]
        for start in range(0, len(mine), 3):
            # Three blocks of a class of 7 hold different rows and leave one out.
            held = mine[start : start + 3].ravel().tolist()
            assert len(set(held)) == len(held)
            left_out |= set(range(7)) - set(held) if len(held) == 6 else set()
    assert left_out == set(range(7))


def test_counted_blocks_are_drawn_once_and_use_rows_evenly():
    blocks = ClassBlocks(LABELS, 2, 6, Seeds(0))
    assert len(blocks) == 4 * 6 * 2
    epochs = [blocks.rows(epoch).reshape(-1, 2) for epoch in range(60)]
    assert not np.array_equal(epochs[0], epochs[1])
    for label in (5, 2):
        drawn = [[tuple(block) for block in rows if LABELS[block[0]] == label] for rows in epochs]
        kept = set().union(*drawn)
        assert len(kept) == 6
        used = np.bincount(np.ravel(list(kept)), minlength=len(LABELS))[label == LABELS]
        assert used.max() - used.min() <= 2
        assert all(len(set(one[start : start + 6])) == len(one[start : start + 6]) for one in drawn for start in (0, 6))
        others = ClassBlocks(LABELS, 2, 6, Seeds(1)).rows(0).reshape(-1, 2)
        assert kept != {tuple(block) for block in others if LABELS[block[0]] == label}


@pytest.mark.parametrize("count", [None, 1, 3])
def test_classes_are_drawn_independently_and_uniformly(count):
    """Two blocks of an epoch are of one class with probability 1/C, however many rows a class has."""
    blocks = ClassBlocks(LABELS, 2, count, Seeds(0))
    drawn = [LABELS[blocks.rows(epoch).reshape(-1, 2)[:, 0]] for epoch in range(3000)]
    pairs = np.array([[one[0], one[1]] for one in drawn])
    shares = np.array([(pairs == label).mean() for label in np.unique(LABELS)])
    np.testing.assert_allclose(shares, 0.25, atol=5 * np.sqrt(0.25 * 0.75 / 6000))
    collision = (pairs[:, 0] == pairs[:, 1]).mean()
    assert collision == pytest.approx(0.25, abs=5 * np.sqrt(0.25 * 0.75 / 3000))


def test_small_classes_are_left_out_and_none_is_an_error():
    assert set(LABELS[ClassBlocks(LABELS, 5, None, Seeds(0)).rows(0)]) == {5, 2}
    with pytest.raises(DataError, match="10 members for a block, at most 9"):
        ClassBlocks(LABELS, 10, 3, Seeds(0))
