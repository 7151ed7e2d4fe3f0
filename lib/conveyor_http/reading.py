"""Reading the answer of a server that may be anybody's, or have gone wrong: whole, up to a size.

Used by `watch` (the API server), the gateway (pages of engines) and the metrics server (the gateways' demand). How long
an answer may take is the session's business (`aiohttp.ClientTimeout`). What passes through the gateway is not read so:
requests are counted in its memory (`relaying.bodies`), and answers of engines go on as they come (`engines.client`).
"""

import aiohttp


class AnswerTooLong(Exception):
    """The rest of the answer was not read."""


async def read_answer(content: aiohttp.StreamReader, max_bytes: int) -> bytearray:
    """All of it. Raises AnswerTooLong, and whatever breaks the connection."""
    body = bytearray()
    async for piece in content.iter_any():
        body += piece
        if len(body) > max_bytes:
            raise AnswerTooLong(f"the answer has more than {max_bytes} bytes")
    return body
