"""Manages KV blocks: which are free, how many requests share each, and which prefix each one contains.

Used by the modules of `scheduling` only. Pure bookkeeping of block numbers: it knows neither requests nor tensors.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockManager:
    """A pool of `num_blocks` blocks with reference counts and an index from prefix hash to block.

    Invariant: a block is free exactly when its count is 0. A free block keeps its hash and can be found until it is
    allocated again. Blocks without a prefix are allocated first, then the least recently freed ones.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """The number of blocks that no request uses."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """The share of the blocks that requests use, 0 to 1."""
        return 1 - self.num_free / self.num_blocks if self.num_blocks else 0.0

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix.

        Does not count a reference: the caller must `share` them next.
        """
        blocks = []
        for prefix_hash in hashes:
            block = self._block_of.get(prefix_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find(self, prefix_hash: bytes) -> int | None:
        """Return the block with this prefix; None if none is known."""
        return self._block_of.get(prefix_hash)

    def num_free_among(self, blocks: Sequence[int]) -> int:
        """Return how many of these blocks are free. Sharing reduces the number of free blocks by this number."""
        return sum(self.ref_counts[block] == 0 for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each of these blocks."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self._free[block]
            self.ref_counts[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks with one reference each, and drop their prefixes.

        The caller has checked `num_free`.
        """
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self.unregister(block)
            self.ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Remove a reference from each block. The last blocks are freed first, because a prefix is useless without its
        beginning."""
        for block in reversed(blocks):
            self.ref_counts[block] -= 1
            assert self.ref_counts[block] >= 0, f"block {block} is freed more often than allocated"
            if self.ref_counts[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def register(self, block: int, prefix_hash: bytes) -> None:
        """Let `match` find the block. If another block already has this prefix, this block cannot be found."""
        if prefix_hash not in self._block_of:
            self._block_of[prefix_hash] = block
            self._hash_of[block] = prefix_hash

    def unregister(self, block: int) -> None:
        """Prevent `match` from finding the block. Does nothing if it cannot be found."""
        prefix_hash = self._hash_of[block]
        if prefix_hash is not None:
            del self._block_of[prefix_hash]
            self._hash_of[block] = None

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless these block tables account for every reference. For tests."""
        counts = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counts[block] += 1
        assert counts == self.ref_counts, "reference counts differ from the block tables"
        assert {b for b, n in enumerate(counts) if n == 0} == set(self._free), "free list differs from the counts"
        for prefix_hash, block in self._block_of.items():
            assert self._hash_of[block] == prefix_hash, "hash index and blocks differ"
        assert len(self._block_of) == sum(h is not None for h in self._hash_of)
