"""What an engine says that a request has used: tokens in and out. Read by `engines.client`, told by `recording`.

The engine's word is its owner's, so only its form is checked. Other runtimes than Conveyor's engine say nothing.
"""

import contextlib
from typing import Annotated, Final

import aiohttp
import msgspec

from conveyor_protocol.request_headers import USAGE_MARK

MAX_REPORT_BYTES: Final = 256

Count = Annotated[int, msgspec.Meta(ge=0, le=10**9)]


class Usage(msgspec.Struct, frozen=True):
    """Of one request."""

    prompt_tokens: Count
    cached_tokens: Count  # of the prompt's, found in the prefix cache
    completion_tokens: Count


_DECODER: Final = msgspec.json.Decoder(Usage)


def parse_usage(report: bytes | str | None) -> Usage | None:
    """None for what is no report."""
    try:
        return None if report is None else _DECODER.decode(report)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None


async def split_report(piece: bytes, rest: aiohttp.StreamReader) -> tuple[bytes, bytes]:
    """The last events of a stream, in `piece` before the mark, and the report behind it, which `rest` goes on with."""
    events, _, report = piece.partition(USAGE_MARK)
    with contextlib.suppress(aiohttp.ClientError, OSError):  # the client has its whole answer
        while len(report) <= MAX_REPORT_BYTES and (more := await rest.readany()):
            report += more
    return events, report
