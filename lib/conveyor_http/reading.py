"""Reads a whole response from an untrusted or faulty server, up to a size.

Used for lists of the API server (`watch`), pages of gateways (`gateways`), pages and reports of engines (the gateway
and `kubectl conveyor advise`), and answers to the requests of jobs. The caller limits the time
(`aiohttp.ClientTimeout`). Bodies that pass through the gateway are not read here: `relaying.bodies` reads requests, and
`engines.session` reads engines' answers.
"""

from collections.abc import Callable

import aiohttp


class AnswerTooLong(Exception):
    """The response is longer than the limit. The rest was not read."""


class NoMemory(Exception):
    """There is no memory for a piece of the response. The rest was not read."""


async def read_answer(
    content: aiohttp.StreamReader, max_bytes: int, reserve: Callable[[int], bool] = lambda num_bytes: True
) -> bytearray:
    """Return the whole body. Raises AnswerTooLong, NoMemory, and aiohttp's errors if the connection fails.

    reserve: called with the size of each piece as it arrives; returns whether there is memory for it.
    """
    body = bytearray()
    async for piece in content.iter_any():
        if not reserve(len(piece)):
            raise NoMemory
        body += piece
        if len(body) > max_bytes:
            raise AnswerTooLong(f"the answer has more than {max_bytes} bytes")
    return body
