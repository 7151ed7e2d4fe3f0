"""The memory that the engine process and the walker share: one slot for each row, with a mask and its ticket.

The walker writes a mask first and its ticket last. So a mask is complete once the slot has the expected ticket. Each
number is 8 bytes, which the processors of the engine's platforms write in one access.
"""

import mmap
import os
import tempfile
from enum import IntEnum
from typing import Final, Self

_NUMBER_BYTES: Final = 8
_LINE_BYTES: Final = 64
NUM_LANES: Final = 2  # threads of the walker that build masks


class Status(IntEnum):
    """What a slot's mask means."""

    MASK = 1
    COMPLETE = 2  # only the end of the answer may follow


class Board:
    """The shared memory. Slots are numbered from 0."""

    def __init__(self, fd: int, num_slots: int, mask_bytes: int) -> None:
        self.fd = fd
        self.num_slots, self.mask_bytes = num_slots, mask_bytes
        self._stride = -(-mask_bytes // _LINE_BYTES) * _LINE_BYTES
        head_bytes = -(-(2 * num_slots + 2 * NUM_LANES + 1) * _NUMBER_BYTES // _LINE_BYTES) * _LINE_BYTES
        size = head_bytes + num_slots * self._stride
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
        memory = memoryview(mmap.mmap(fd, size))
        self._masks = memory[head_bytes:]
        numbers = memory[:head_bytes].cast("Q")
        self._tickets, self._statuses = numbers[:num_slots], numbers[num_slots : 2 * num_slots]
        self._lanes = numbers[2 * num_slots : 2 * num_slots + 2 * NUM_LANES]
        self._sleeps = numbers[2 * num_slots + 2 * NUM_LANES :][:1]

    @classmethod
    def create(cls, num_slots: int, mask_bytes: int) -> Self:
        """Create the memory."""
        if hasattr(os, "memfd_create"):
            return cls(os.memfd_create("masks", os.MFD_CLOEXEC), num_slots, mask_bytes)
        fd, path = tempfile.mkstemp(prefix="masks-")
        os.unlink(path)
        return cls(fd, num_slots, mask_bytes)

    def write(self, slot: int, ticket: int, status: Status, mask: bytes) -> None:
        """Publish the mask of a slot. Only the walker calls this."""
        start = slot * self._stride
        self._masks[start : start + self.mask_bytes] = mask
        self._statuses[slot] = status
        self._tickets[slot] = ticket

    def has(self, slot: int, ticket: int) -> bool:
        """Return whether the slot has the mask with this ticket."""
        return self._tickets[slot] == ticket

    def is_complete(self, slot: int) -> bool:
        """Return whether only the end of the answer may follow the slot's state."""
        return self._statuses[slot] == Status.COMPLETE

    def read(self, slot: int) -> bytes:
        """Return a copy of the slot's mask."""
        start = slot * self._stride
        return bytes(self._masks[start : start + self.mask_bytes])

    def begin_work(self, lane: int, ticket: int) -> None:
        """Record that a lane of the walker works on this ticket; 0: on none."""
        self._lanes[lane] = ticket

    def list_work(self) -> list[int]:
        """Return the ticket that each lane works on; 0: none."""
        return list(self._lanes[:NUM_LANES])

    @property
    def loop_sleeps(self) -> bool:
        """Whether the engine's loop waits for a mask."""
        return bool(self._sleeps[0])

    @loop_sleeps.setter
    def loop_sleeps(self, sleeps: bool) -> None:
        self._sleeps[0] = sleeps
