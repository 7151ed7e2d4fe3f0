"""The requests that the engine process holds, and the tokens of their prompts: what bounds its memory.

Owned by `engine_client`. A request counts from when it is sent until the engine gives its last output. Tokens of the
parts of a list that are not sent yet count too: this process holds them. One whose client
has left counts too: the engine may be in a step, and its prompt waits in the engine process until then.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from conveyor_engine.config.engine_config import MAX_TOKENS
from conveyor_engine.errors import Overloaded

# 64 MiB of 4 bytes a token, and as many tokens as the longest context has: a prompt that is valid fits by itself.
HELD_TOKENS_MAX: Final = MAX_TOKENS


class HeldRequests:
    """The number of prompt tokens of each open request, by id."""

    def __init__(self) -> None:
        self._num_tokens_of: dict[str, int] = {}
        self._unsent: set[str] = set()
        self.num_tokens = 0

    def __len__(self) -> int:
        """Requests that the engine process has."""
        return len(self._num_tokens_of) - len(self._unsent)

    def check_room(self, num_tokens: int) -> None:
        """Raises Overloaded if so many tokens do not fit beside those that are held."""
        if self.num_tokens and self.num_tokens + num_tokens > HELD_TOKENS_MAX:
            raise Overloaded(
                f"the prompts that are waiting or running here have {self.num_tokens} tokens, and with this request "
                f"they would have more than {HELD_TOKENS_MAX}; try again later"
            )

    def add(self, num_tokens_of: Mapping[str, int]) -> None:
        """These will be sent to the engine. Their tokens are held from now on."""
        self._num_tokens_of.update(num_tokens_of)
        self._unsent.update(num_tokens_of)
        self.num_tokens += sum(num_tokens_of.values())

    def send(self, request_ids: Iterable[str]) -> None:
        """The engine is sent these."""
        self._unsent.difference_update(request_ids)

    def release(self, request_id: str) -> None:
        """The engine has ended or refused it, or will never be sent it."""
        self._unsent.discard(request_id)
        self.num_tokens -= self._num_tokens_of.pop(request_id, 0)
