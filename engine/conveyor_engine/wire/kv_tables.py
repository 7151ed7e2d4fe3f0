"""How many block tables a request has in the KV cache, and how many blocks it needs in them.

`execution.attention.groups` chooses the tables, and `scheduling.block_tables` fills them.
"""

from bisect import bisect_right
from typing import Final

import msgspec

TILE_TOKENS: Final = 128  # the largest tile of keys that an attention kernel reads


class KVTables(msgspec.Struct, frozen=True, array_like=True):
    """The block tables of a request. Each has a block for the same tokens, but of other layers.

    The first `full` tables keep all blocks. The `windowed` ones after them keep those that later tokens see.
    """

    full: int = 1
    windowed: int = 0
    window: int = 0  # tokens that a token sees in the layers of the windowed tables
    in_flight: int = 0  # the most tokens of a request in all open steps, before their blocks can be freed

    @property
    def number(self) -> int:
        return self.full + self.windowed

    def first_kept(self, num_computed_tokens: int, block_size: int) -> int:
        """Return the index of the first block that windowed tables keep after so many computed tokens.

        Kernels read whole tiles of keys, so a tile is kept if any of its keys is. One token more is kept, because the
        last token may be computed again.
        """
        return max(0, num_computed_tokens - self.window) // TILE_TOKENS * TILE_TOKENS // block_size

    def count_kept(self, num_tokens: int, block_size: int) -> int:
        """Return the number of blocks, in all tables, of a request with so many computed tokens."""
        blocks = -(-num_tokens // block_size)
        return self.full * blocks + self.windowed * (blocks - self.first_kept(num_tokens, block_size))

    def count_needed(self, num_tokens: int, block_size: int) -> int:
        """Return the largest number of blocks that a request needs until it has so many computed tokens."""
        blocks = -(-num_tokens // block_size)
        seen = -(-(self.window + self.in_flight + TILE_TOKENS) // block_size) + 2
        return self.full * blocks + self.windowed * min(blocks, seen)

    def count_tokens(self, num_blocks: int, block_size: int, length: int) -> int:
        """Return how many tokens a pool of blocks holds if each request has `length` tokens."""
        return num_blocks * block_size * -(-length // block_size) // self.count_kept(length, block_size)

    def find_longest(self, num_blocks: int, block_size: int) -> int:
        """Return the length of the longest request that fits into so many blocks, a multiple of the block size."""
        lengths = range(0, (num_blocks // max(1, self.full) + 1) * block_size, block_size)
        return lengths[bisect_right(lengths, num_blocks, key=lambda length: self.count_needed(length, block_size)) - 1]


ONE_TABLE: Final = KVTables()
