"""Finds callers by the tokens of their ServiceAccounts, with the cluster's published keys (docs/adr/0179).

The source of objects passes the keys, and `conveyor_tokens` verifies. If a token names an unknown key, the keys are
read again.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from conveyor_api.names import TOKEN_AUDIENCE
from conveyor_gateway.caller import Caller
from conveyor_gateway.watching.keys import Proof
from conveyor_tokens.verifier import TokenRejected, TokenVerifier, UnknownKey, is_token

logger = logging.getLogger(__name__)

SHORTEST_SECONDS: Final = 5.0  # between two reads of the keys, whatever clients send


class Issuer:
    """The issuer of the cluster's tokens. `wanted` is set when a token names a key that is not known.

    Without `begin` nobody reads keys, so a token with an unknown key is rejected and never pending.
    """

    def __init__(self, now_unix: Callable[[], float] = time.time) -> None:
        self.wanted = asyncio.Event()
        self._now_unix = now_unix
        self._attempted_unix = math.inf  # the end of the last attempt to read the keys
        self._verifier = TokenVerifier(TOKEN_AUDIENCE, Caller, now_unix)

    def begin(self) -> None:
        """Expect a first attempt to read the keys."""
        self._attempted_unix = -math.inf

    def note_attempt(self) -> None:
        """Note that an attempt to read the keys has ended, whether or not it has failed."""
        self._attempted_unix = self._now_unix()

    def set_keys(self, name: str, published: Sequence[Mapping[str, Any]]) -> None:
        """Use these keys from now on. Callers that other keys have proved are forgotten."""
        if self._verifier.set_keys(name, published):
            logger.info("event=issuer issuer=%s keys=%d", name, self._verifier.num_keys)

    def find(self, text: str) -> Proof | None:
        """Return the proof for a token; None if the text has not the form of a token."""
        if not is_token(text):
            return None
        try:
            return Proof(self._verifier.verify(text))
        except TokenRejected as error:
            is_pending = isinstance(error, UnknownKey) and self._want_keys()
            return Proof(None, f"this token is not valid: {error}", is_pending)

    def _want_keys(self) -> bool:
        """Request a read of the keys. Returns whether it may begin now."""
        self.wanted.set()
        return self._now_unix() - self._attempted_unix >= SHORTEST_SECONDS
