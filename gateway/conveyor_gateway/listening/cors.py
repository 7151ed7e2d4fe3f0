"""Cross-origin resource sharing (fetch.spec.whatwg.org): which web pages may read the gateway's answers.

Used by `public` for preflight requests, and by `listener` for the headers of every answer. Engines cannot set these
headers, because `engines.headers` does not forward them. Credentials such as cookies are never allowed.
"""

from dataclasses import dataclass
from typing import Final

from aiohttp.web import BaseRequest, Response

from conveyor_protocol.open_inference import JSON_LENGTH_HEADER
from conveyor_protocol.request_headers import REQUEST_ID_HEADER

ANY: Final = "*"
_MAX_AGE_SECONDS: Final = 600
_PREFLIGHT: Final = {
    "Access-Control-Allow-Methods": "GET, POST",
    "Access-Control-Allow-Headers": "authorization, *",  # `*` does not include authorization
    "Access-Control-Max-Age": str(_MAX_AGE_SECONDS),
}


@dataclass(frozen=True, slots=True)
class Cors:
    """The allowed origins of web pages, for example `https://chat.example.com`; `*` allows all."""

    origins: frozenset[str] = frozenset()

    def build_headers(self, request: BaseRequest) -> dict[str, str]:
        """Return the CORS headers of a response; empty if no origin is allowed."""
        if not self.origins:
            return {}
        if ANY in self.origins:
            return _allow(ANY)
        varies = {"Vary": "Origin"}  # tells caches that the answer depends on the origin
        origin = request.headers.get("Origin", "")
        return varies | _allow(origin) if origin in self.origins else varies

    def answer_preflight(self, request: BaseRequest) -> Response | None:
        """Return the response to a preflight request; None for other requests, or if no origin is allowed."""
        if request.method != "OPTIONS" or not self.origins or "Access-Control-Request-Method" not in request.headers:
            return None
        return Response(status=204, headers=_PREFLIGHT)


NOBODY: Final = Cors()


def _allow(origin: str) -> dict[str, str]:
    return {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Expose-Headers": f"{REQUEST_ID_HEADER}, Retry-After, {JSON_LENGTH_HEADER}",
    }
