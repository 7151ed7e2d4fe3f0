"""Tests how blocks are allocated, shared, found again and forgotten."""

import pytest

from conveyor_engine.scheduling.block_manager import BlockManager


def test_a_block_is_free_until_it_is_handed_out_and_again_after_its_last_holder() -> None:
    blocks = BlockManager(4)
    mine = blocks.allocate(3)
    blocks.share(mine[:1])
    blocks.free(mine)
    assert blocks.num_free == 3
    blocks.check([mine[:1]])
    blocks.free(mine[:1])
    blocks.check([])
    assert blocks.num_free == 4


def test_the_longest_known_prefix_is_found_and_no_more() -> None:
    blocks = BlockManager(4)
    mine = blocks.allocate(3)
    for block, prefix_hash in zip(mine, (b"a", b"ab", b"abc"), strict=True):
        blocks.register(block, prefix_hash)
    assert blocks.match([b"a", b"ab", b"abx"]) == mine[:2]
    assert blocks.match([b"x", b"ab"]) == []


def test_a_freed_prefix_is_found_until_its_block_is_needed() -> None:
    blocks = BlockManager(2)
    first, second = blocks.allocate(2)
    blocks.register(first, b"a")
    blocks.free([first, second])
    assert blocks.match([b"a"]) == [first]
    assert blocks.allocate(1) == [second], "a block that holds nothing goes first"
    assert blocks.allocate(1) == [first]
    assert blocks.match([b"a"]) == []


def test_the_least_recently_freed_prefix_is_forgotten_first_and_tails_before_heads() -> None:
    blocks = BlockManager(4)
    old, new = blocks.allocate(2), blocks.allocate(2)
    for block, prefix_hash in zip(old + new, (b"o", b"oo", b"n", b"nn"), strict=True):
        blocks.register(block, prefix_hash)
    blocks.free(old)
    blocks.free(new)
    assert blocks.allocate(4) == [old[1], old[0], new[1], new[0]]


def test_a_second_block_of_the_same_prefix_stays_private() -> None:
    blocks = BlockManager(2)
    first, second = blocks.allocate(2)
    blocks.register(first, b"a")
    blocks.register(second, b"a")
    blocks.unregister(second)
    assert blocks.match([b"a"]) == [first]
    blocks.check([[first, second]])


def test_sharing_takes_free_blocks_out_of_the_pool() -> None:
    blocks = BlockManager(2)
    (block,) = blocks.allocate(1)
    blocks.register(block, b"a")
    blocks.free([block])
    assert blocks.num_free_among([block]) == 1
    blocks.share([block])
    assert (blocks.num_free, blocks.num_free_among([block])) == (1, 0)


def test_freeing_more_often_than_holding_is_a_bug() -> None:
    blocks = BlockManager(1)
    mine = blocks.allocate(1)
    blocks.free(mine)
    with pytest.raises(AssertionError, match="freed more often"):
        blocks.free(mine)
