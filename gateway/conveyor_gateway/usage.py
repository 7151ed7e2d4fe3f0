"""The usage that an engine reports for a request. Read by `engines`, logged and counted by `recording`.

The report comes from a tenant's pod, so only its format can be checked. Conveyor's own engine sends reports; other
runtimes, such as vLLM, do not.
"""

import contextlib
from typing import Final

import aiohttp
import msgspec

from conveyor_protocol.request_headers import USAGE_MARK
from conveyor_protocol.usage import UsedTokens

MAX_REPORT_BYTES: Final = 256

_DECODER: Final = msgspec.json.Decoder(UsedTokens)


def parse_usage(report: bytes | str | None) -> UsedTokens | None:
    """Return the usage in the report, or None if the report is missing or malformed."""
    try:
        return None if report is None else _DECODER.decode(report)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None


async def split_report(piece: bytes, rest: aiohttp.StreamReader) -> tuple[bytes, bytes]:
    """Split the end of a stream at the usage mark.

    Return the events before the mark, and the report after it: the end of `piece` and what follows in `rest`.
    """
    events, _, report = piece.partition(USAGE_MARK)
    with contextlib.suppress(aiohttp.ClientError, OSError):  # ignored, because the client already has its whole answer
        while len(report) <= MAX_REPORT_BYTES and (more := await rest.readany()):
            report += more
    return events, report
