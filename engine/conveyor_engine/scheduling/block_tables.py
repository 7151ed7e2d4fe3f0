"""Allocates, grows, shares and frees the row and the KV blocks of each admitted request.

Used by `running_batch` only. `block_manager` counts the blocks. This module knows no batches and no policies.
"""

from conveyor_engine.scheduling.block_manager import BlockManager
from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.shares import NO_SHARES, Shares


class BlockTables:
    """Rows and block tables of the admitted requests.

    Full blocks of known tokens are found as cached prefixes once the tokens are scheduled. Other requests may share
    them in the same step, or in a step that is planned before the result is known. This is correct, because steps run
    in order, and each layer writes all keys before any row attends. If the step fails, or the request leaves before the
    step ends, `unschedule` removes these blocks from the prefix cache.
    """

    def __init__(
        self, blocks: BlockManager, block_size: int, num_rows: int, *, prefix_caching: bool, shares: Shares = NO_SHARES
    ) -> None:
        self._blocks = blocks
        self._shares = shares
        self._block_size = block_size
        self._prefix_caching = prefix_caching
        self.free_rows = list(range(num_rows - 1, -1, -1))

    def allocate(self, request: RequestState, num_tokens: int, spare_blocks: int) -> bool:
        """Allocate a row and a table for `num_tokens`. Cached blocks come first, and their tokens count as computed.

        Returns False, without an allocation, if there is no row or if fewer than `spare_blocks` blocks would stay free.
        """
        if not self.free_rows:
            return False
        hits = self._match(request)
        missing = self.count_blocks(num_tokens) - len(hits)
        if missing + self._blocks.num_free_among(hits) + spare_blocks > self._blocks.num_free:
            return False
        self._blocks.share(hits)
        request.block_table = hits + self._blocks.allocate(missing)
        request.num_registered_blocks = len(hits)
        request.rewind(len(hits) * self._block_size)
        request.row = self.free_rows.pop()
        request.num_sent_blocks = -1
        self._shares.hold(request.level, 1, len(request.block_table))
        return True

    def count_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks for this number of tokens; 0 for a task without a KV cache."""
        return -(-num_tokens // self._block_size) if self._blocks.num_blocks else 0

    def _match(self, request: RequestState) -> list[int]:
        """Return the cached blocks of the request's prefix.

        The last token is never taken from the cache, because the next token is sampled from its logits.
        Returns no blocks while log probabilities of the prompt are missing, because they need the logits of each token.
        """
        if not self._prefix_caching or not request.is_scored:
            return []
        num_tokens = len(request.token_ids) - 1
        hashes = request.hashes_of_full_blocks(self._block_size, num_tokens)
        return self._blocks.match(hashes[: num_tokens // self._block_size])

    def grow(self, request: RequestState, num_tokens: int) -> bool:
        """Allocate blocks for the first `num_tokens` tokens.

        Returns False, without an allocation, if too few are free.
        """
        missing = self.count_blocks(num_tokens) - len(request.block_table)
        if missing <= 0:
            return True
        if missing > self._blocks.num_free:
            return False
        request.block_table.extend(self._blocks.allocate(missing))
        self._shares.hold(request.level, 0, missing)
        return True

    def register(self, request: RequestState, num_tokens: int) -> None:
        """Make the full blocks of the first `num_tokens` tokens, which are scheduled, findable as cached prefixes.

        Tokens that open steps still have to sample are not included.
        """
        if not self._prefix_caching or num_tokens // self._block_size <= request.num_registered_blocks:
            return
        num_tokens = min(num_tokens, len(request.token_ids))
        num_full = num_tokens // self._block_size
        hashes = request.hashes_of_full_blocks(self._block_size, num_tokens)
        for index in range(request.num_registered_blocks, num_full):
            self._blocks.register(request.block_table[index], hashes[index])
        request.num_registered_blocks = num_full

    def unschedule(self, request: RequestState, num_tokens: int) -> set[int]:
        """Remove the blocks after the first `num_tokens` tokens from the prefix cache, and return these blocks."""
        num_full = num_tokens // self._block_size
        for block in request.block_table[num_full : request.num_registered_blocks]:
            self._blocks.unregister(block)
        request.num_registered_blocks = min(request.num_registered_blocks, num_full)
        return set(request.block_table[num_full:])

    def computed_blocks(self, request: RequestState) -> list[int]:
        """Return the request's blocks that contain only computed tokens, including shared blocks."""
        return request.block_table[: request.num_computed_tokens // self._block_size]

    def evict(self, request: RequestState) -> None:
        """Remove the request's blocks from the prefix cache.

        They may contain NaN, which would spread to other requests.
        """
        for block in request.block_table:
            self._blocks.unregister(block)

    def free(self, request: RequestState) -> None:
        """Free the request's row and blocks.

        Full blocks stay findable until they are reused. Called after `unschedule`.
        """
        assert request.num_registered_blocks * self._block_size <= request.num_computed_tokens
        request.admission += 1
        request.num_registered_blocks = 0
        self._shares.hold(request.level, -1, -len(request.block_table))
        self._blocks.free(request.block_table)
        request.block_table = []
        self.free_rows.append(request.row)
        request.row = -1
