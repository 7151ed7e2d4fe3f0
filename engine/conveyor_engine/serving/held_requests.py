"""Counts the requests that the engine process holds and the tokens of their prompts, to limit memory.

Owned by `engine_client`. A request counts from when it is sent until the engine returns its last output. A request
whose client has disconnected counts too, because its prompt stays in the engine process until the current step ends.
If a list of inputs is sent in parts, the tokens of unsent parts count too, because this process holds them.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from conveyor_engine.config.kinds import MAX_TOKENS
from conveyor_engine.errors import Overloaded

# 64 MiB of memory, at 4 bytes per token. The longest context has this many tokens, so every valid prompt fits alone.
HELD_TOKENS_MAX: Final = MAX_TOKENS
HELD_TOKENS_MAX_WITH_IMAGES: Final = 8 * MAX_TOKENS  # an image of two megapixels is up to 6 million


class HeldRequests:
    """The requests that count now: the number of prompt tokens of each, by request id."""

    def __init__(self) -> None:
        self._num_tokens_of: dict[str, int] = {}
        self._unsent: set[str] = set()
        self.num_tokens = 0
        self.max_tokens = HELD_TOKENS_MAX

    def __len__(self) -> int:
        """The number of requests that the engine process has."""
        return len(self._num_tokens_of) - len(self._unsent)

    def check_room(self, num_tokens: int) -> None:
        """Raise Overloaded if this many more tokens would exceed the limit. If none are held, any number fits."""
        if self.num_tokens and self.num_tokens + num_tokens > self.max_tokens:
            raise Overloaded(
                f"the prompts that are waiting or running here have {self.num_tokens} tokens, and with this request "
                f"they would have more than {self.max_tokens}; try again later"
            )

    def add(self, num_tokens_of: Mapping[str, int]) -> None:
        """Add requests that will be sent to the engine. Their tokens count from now on."""
        self._num_tokens_of.update(num_tokens_of)
        self._unsent.update(num_tokens_of)
        self.num_tokens += sum(num_tokens_of.values())

    def send(self, request_ids: Iterable[str]) -> None:
        """Record that these requests are sent to the engine."""
        self._unsent.difference_update(request_ids)

    def release(self, request_id: str) -> None:
        """Remove a request that the engine has ended or refused, or that will never be sent."""
        self._unsent.discard(request_id)
        self.num_tokens -= self._num_tokens_of.pop(request_id, 0)
