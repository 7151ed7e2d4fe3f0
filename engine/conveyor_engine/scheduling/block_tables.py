"""Allocates, grows, shares and frees the row and the KV blocks of each admitted request.

Used by `running_batch` only. `block_manager` counts the blocks. This module knows no batches and no policies.
"""

from collections.abc import Iterator, Sequence

from conveyor_engine.scheduling.block_manager import BlockManager
from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.shares import NO_SHARES, Shares
from conveyor_engine.scheduling.window_blocks import WindowBlocks
from conveyor_engine.wire.kv_tables import ONE_TABLE, KVTables


class BlockTables:
    """Rows and block tables of the admitted requests.

    Full blocks of known tokens are found as cached prefixes once the tokens are scheduled. Other requests may share
    them in the same step, or in a step that is planned before the result is known. This is correct, because steps run
    in order, and each layer writes all keys before any row attends. If the step fails, or the request leaves before the
    step ends, `unschedule` removes these blocks from the prefix cache.

    In a windowed table, a request keeps the blocks that its next token sees. The blocks before them are freed once the
    tokens are computed, not when they are scheduled, because an open step may fail. A prefix is shared if the full
    tables have all of its blocks and the windowed ones have the last ones.
    """

    def __init__(
        self,
        blocks: BlockManager,
        block_size: int,
        num_rows: int,
        *,
        prefix_caching: bool,
        shares: Shares = NO_SHARES,
        tables: KVTables = ONE_TABLE,
        step_tokens: int = 0,
    ) -> None:
        """step_tokens: the most tokens of a step."""
        self._blocks = blocks
        self._shares = shares
        self._block_size = block_size
        self._prefix_caching = prefix_caching
        self._tables, self._step_tokens = tables, step_tokens
        self._full, self._windowed = range(tables.full), range(tables.full, tables.number)
        self.num_held = 0  # blocks of all requests; a shared block counts for each of them
        self.free_rows = list(range(num_rows - 1, -1, -1))

    def allocate(self, request: RequestState, num_tokens: int, spare_blocks: int) -> bool:
        """Allocate a row and tables for `num_tokens`. Cached blocks come first, and their tokens count as computed.

        In the windowed tables, allocates the blocks of the first window only, but checks that those of a first step are
        free too. Returns False, without an allocation, if there is no row or if fewer than `spare_blocks` blocks would
        stay free.
        """
        if not self.free_rows:
            return False
        num_hits, hits, window_hits = self._match(request)
        num_cached = num_hits * self._block_size
        missing = self.count_blocks(num_tokens) * self._tables.full - len(hits)
        of_window = of_step = 0
        if self._windowed:
            of_window, of_step = self._count_window(num_tokens, num_hits)
        num_freed = self._blocks.num_free_among(hits + window_hits)
        if missing + of_step + num_freed + spare_blocks > self._blocks.num_free:
            return False
        self._blocks.share(hits + window_hits)
        request.block_table = hits + self._blocks.allocate(missing)
        if self._windowed:
            first = self._tables.first_kept(num_cached, self._block_size)
            request.window = WindowBlocks(self._tables.windowed, first, window_hits + self._blocks.allocate(of_window))
        request.num_registered_blocks = num_hits
        request.rewind(num_cached)
        request.row = self.free_rows.pop()
        request.num_sent_blocks = -1
        self._hold(request, 1, request.num_blocks)
        return True

    def _hold(self, request: RequestState, num_rows: int, num_blocks: int) -> None:
        """Count the rows and blocks that the request newly has. Negative numbers are freed."""
        self.num_held += num_blocks
        self._shares.hold(request.level, num_rows, num_blocks)

    def _count_window(self, num_tokens: int, num_hits: int) -> tuple[int, int]:
        """Return the number of blocks that windowed tables get at first, and that number with those of a first step."""
        first_window = max(num_hits * self._block_size, self._tables.window)  # cached tokens are a window already
        of_window, of_step = (
            self._tables.windowed * max(0, self.count_blocks(min(num_tokens, first_window + more)) - num_hits)
            for more in (0, self._step_tokens)
        )
        return of_window, of_step

    def count_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks in one table for so many tokens; 0 for a task without a KV cache."""
        return -(-num_tokens // self._block_size) if self._blocks.num_blocks else 0

    def count_reserved(self, num_tokens: int) -> int:
        """Return the number of blocks, in all tables, that `allocate` allocates without a cached prefix."""
        of_window = self.count_blocks(min(num_tokens, self._tables.window))
        return self._tables.full * self.count_blocks(num_tokens) + self._tables.windowed * of_window

    def _match(self, request: RequestState) -> tuple[int, list[int], list[int]]:
        """Return the length in blocks of the request's cached prefix, and its blocks in full and windowed tables.

        The last token is never taken from the cache, because the next token is sampled from its logits.
        Returns no blocks while log probabilities of the prompt are missing, because they need the logits of each token.
        """
        if not self._prefix_caching or not request.is_scored:
            return 0, [], []
        num_tokens = len(request.token_ids) - 1
        hashes = request.hashes_of_full_blocks(self._block_size, num_tokens)[: num_tokens // self._block_size]
        full = self._tables.full
        hits = self._blocks.match(_keys(hashes, self._full))
        num_hits = len(hits) // full if full else len(hashes)
        window_hits: list[int] = []
        if self._windowed:
            num_hits, window_hits = self._match_window(hashes[:num_hits])
        return num_hits, hits[: num_hits * full], window_hits

    def _match_window(self, hashes: Sequence[bytes]) -> tuple[int, list[int]]:
        """Return the longest prefix whose last blocks the windowed tables have, and these blocks."""
        end = index = len(hashes)
        found: list[list[int]] = []  # of the indices before `end`, last index first
        while index > (first := self._tables.first_kept(end * self._block_size, self._block_size)):
            index -= 1
            of_index = self._blocks.match(_keys(hashes[index : index + 1], self._windowed))
            found.append(of_index)
            if len(of_index) < self._tables.windowed:
                end, found = index, []
        return end, [block for of_index in reversed(found[: end - first]) for block in of_index]

    def grow(self, request: RequestState, num_tokens: int, num_scheduled: int) -> bool:
        """Free blocks that the request needs no more. Allocate blocks for `num_tokens` tokens.

        The windowed tables get blocks for `num_scheduled` tokens. Returns False, without an allocation, if too few are
        free.
        """
        missing = self.count_blocks(num_tokens) * self._tables.full - len(request.block_table)
        of_window = 0
        if self._windowed:
            self._free_unseen(request)
            of_window = max(0, self.count_blocks(num_scheduled) - request.window.end) * self._tables.windowed
        if missing <= 0 and not of_window:
            return True
        missing = max(0, missing)
        if missing + of_window > self._blocks.num_free:
            return False
        request.block_table.extend(self._blocks.allocate(missing))
        request.window.blocks.extend(self._blocks.allocate(of_window))
        self._hold(request, 0, missing + of_window)
        return True

    def _free_unseen(self, request: RequestState) -> None:
        num_tokens = min(request.num_computed_tokens, request.num_live_tokens)  # dummies may be computed again
        dropped = request.window.drop_before(self._tables.first_kept(num_tokens, self._block_size))
        if dropped:
            self._blocks.free(dropped)
            self._hold(request, 0, -len(dropped))

    def register(self, request: RequestState, num_tokens: int) -> None:
        """Make the full blocks of the first `num_tokens` tokens, which are scheduled, findable as cached prefixes.

        Tokens that open steps still have to sample are not included.
        """
        if not self._prefix_caching or num_tokens // self._block_size <= request.num_registered_blocks:
            return
        num_tokens = min(num_tokens, len(request.token_ids))
        num_full = num_tokens // self._block_size
        hashes = request.hashes_of_full_blocks(self._block_size, num_tokens)
        begin = request.num_registered_blocks
        blocks = request.block_table[begin * self._tables.full : num_full * self._tables.full]
        self._register(blocks, hashes[begin:num_full], self._full)
        if self._windowed:
            kept = max(begin, request.window.first)
            self._register(request.window.between(kept, num_full), hashes[kept:num_full], self._windowed)
        request.num_registered_blocks = num_full

    def _register(self, blocks: Sequence[int], hashes: Sequence[bytes], tables: range) -> None:
        for block, key in zip(blocks, _keys(hashes, tables), strict=True):
            self._blocks.register(block, key)

    def _blocks_between(self, request: RequestState, begin: int, end: int | None) -> list[int]:
        """Return the request's blocks from index `begin` to before index `end`, of each table."""
        full = self._tables.full
        blocks = request.block_table[begin * full : None if end is None else end * full]
        if self._windowed:
            blocks += request.window.between(begin, request.window.end if end is None else end)
        return blocks

    def unschedule(self, request: RequestState, num_tokens: int) -> set[int]:
        """Remove the blocks after the first `num_tokens` tokens from the prefix cache, and return these blocks."""
        num_full = num_tokens // self._block_size
        for block in self._blocks_between(request, num_full, request.num_registered_blocks):
            self._blocks.unregister(block)
        request.num_registered_blocks = min(request.num_registered_blocks, num_full)
        return set(self._blocks_between(request, num_full, None))

    def computed_blocks(self, request: RequestState) -> list[int]:
        """Return the request's blocks that contain only computed tokens, including shared blocks."""
        return self._blocks_between(request, 0, request.num_computed_tokens // self._block_size)

    def evict(self, request: RequestState) -> None:
        """Remove the request's blocks from the prefix cache, also those that it has freed.

        They may contain NaN, which would spread to other requests.
        """
        for key in _keys(request.block_hashes, range(self._tables.number)):
            block = self._blocks.find(key)
            if block is not None:
                self._blocks.unregister(block)

    def free(self, request: RequestState) -> None:
        """Free the request's row and blocks.

        Full blocks stay findable until they are reused. Called after `unschedule`.
        """
        assert request.num_registered_blocks * self._block_size <= request.num_computed_tokens
        request.admission += 1
        request.num_registered_blocks = 0
        self._hold(request, -1, -request.num_blocks)
        self._blocks.free(request.block_table)
        self._blocks.free(request.window.blocks)
        request.block_table, request.window = [], WindowBlocks()
        self.free_rows.append(request.row)
        request.row = -1


def _keys(hashes: Sequence[bytes], tables: range) -> Iterator[bytes]:
    """Return the keys of blocks with these prefixes: those of all tables for the first prefix, and so on."""
    return (prefix_hash + bytes([table]) if table else prefix_hash for prefix_hash in hashes for table in tables)
