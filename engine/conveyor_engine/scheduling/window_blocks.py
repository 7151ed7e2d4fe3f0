"""The blocks of one request in the windowed tables (`KVTables`). Changed by `block_tables`, sent by `step`."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class WindowBlocks:
    """The blocks from index `first` on: those of all tables for one index, then those for the next index."""

    num_tables: int = 0
    first: int = 0
    blocks: list[int] = field(default_factory=list)
    end_sent: int = 0  # the executor has the blocks up to this index

    @property
    def end(self) -> int:
        """The index after the last block."""
        return self.first + len(self.blocks) // self.num_tables if self.num_tables else self.first

    def between(self, begin: int, end: int) -> list[int]:
        """Return the blocks from index `begin` to before index `end`, as far as they are kept."""
        begin, end = max(0, begin - self.first), max(0, end - self.first)
        return self.blocks[begin * self.num_tables : end * self.num_tables]

    def drop_before(self, first: int) -> list[int]:
        """Remove the blocks before this index, and return them."""
        dropped = self.between(self.first, first)
        del self.blocks[: len(dropped)]
        self.first = max(self.first, first)
        return dropped

    @property
    def unsent(self) -> list[int]:
        """The blocks that the executor does not have."""
        return self.between(self.end_sent, self.end)

    def mark_sent(self) -> None:
        self.end_sent = self.end
