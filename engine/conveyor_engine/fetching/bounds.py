"""Limits on a source's responses: how slow they may be, and how long if they are not files.

Used by `hub` and `bucket`, each of which puts `limit_chunks` between its library and the network.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from conveyor_engine.errors import ModelError
from conveyor_protocol.failure_reasons import FailureReason

MAX_ANSWER_BYTES: Final = 32 << 20  # of a listing, an error or a bucket's block; a hub lists about 300 bytes a file
MAX_FILES: Final = 1000  # of a model; one response of a bucket lists up to this many
MIN_BYTES: Final = 64 << 10  # minimum that a response must deliver ...
WINDOW_SECONDS: Final = 60.0  # ... in this time of waiting


class TooSlow(ModelError):
    """The source sends almost nothing. Another try would be as slow."""


def limit_chunks(
    chunks: Iterable[bytes],
    source: str,
    max_bytes: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[bytes]:
    """Yield the chunks as they arrive. Raises ModelError (ModelDownloadFailed) if they exceed a limit.

    Only the time spent waiting for chunks counts, not the time in which the caller writes them.
    """
    arriving, waited_seconds, num_recent, num_bytes = iter(chunks), 0.0, 0, 0
    while True:
        began = clock()
        chunk = next(arriving, None)
        waited_seconds += clock() - began
        if chunk is None:
            return
        num_recent += len(chunk)
        num_bytes += len(chunk)
        if max_bytes is not None and num_bytes > max_bytes:
            raise failed(f"{source} sends an answer of more than {max_bytes >> 20} MiB, which is no list of files")
        if waited_seconds >= WINDOW_SECONDS:
            if num_recent < MIN_BYTES:
                message = f"{source} is too slow: it has sent {num_recent} bytes in {waited_seconds:.0f} s"
                raise TooSlow(message, reason=FailureReason.MODEL_DOWNLOAD_FAILED)
            waited_seconds, num_recent = 0.0, 0
        yield chunk


def failed(message: str) -> ModelError:
    return ModelError(message, reason=FailureReason.MODEL_DOWNLOAD_FAILED)
