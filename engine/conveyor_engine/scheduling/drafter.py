"""Drafts the next tokens of one request, and estimates how many of them the model would accept. Used by `speculation`.

Each token of an answer is compared with the guess that its drafter had, whether or not a step computed the guess as a
draft. So the estimate costs the device nothing, and is there before the first draft. Pure.
"""

from array import array
from typing import Final

from conveyor_engine.scheduling.ngrams import NGrams

_NUM_KINDS: Final = 7
_KEPT_OF_REQUEST: Final = 32  # guesses of one kind; then both counts are halved, so that old guesses count less
KEPT_OF_SERVICE: Final = 256  # the same for `Rates` of all requests
_WEIGHT: Final = 4.0  # the service's rate counts as much as so many guesses of the request


class Rates:
    """How many guesses were right, by kind: after 0, 1, 2 to 3, 4 to 7, ... right guesses in a row.

    A text that copies itself is guessed right for long, and a chance match is not, so each kind has a rate of its own.
    """

    __slots__ = ("_kept", "num_right", "total")

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self.num_right = [0.0] * _NUM_KINDS
        self.total = [0.0] * _NUM_KINDS

    def add(self, kind: int, is_right: bool) -> None:
        if self.total[kind] >= self._kept:
            self.total[kind] /= 2
            self.num_right[kind] /= 2
        self.total[kind] += 1
        self.num_right[kind] += is_right


class Drafter:
    """The guesses for one request."""

    __slots__ = ("_ngrams", "_of_request", "_of_service")

    def __init__(self, num_tokens: int, of_service: Rates) -> None:
        """num_tokens: the most tokens of the request. of_service: the rates of all requests together."""
        self._ngrams = NGrams(num_tokens)
        self._of_service = of_service
        self._of_request = Rates(_KEPT_OF_REQUEST)

    def read(self, token_ids: "array[int]", num_prompt_tokens: int, most: int) -> int:
        """Read the request's new tokens, at most so many. Returns how many it has read."""
        begin = self._ngrams.num_seen
        end = min(len(token_ids), begin + most)
        self._ngrams.follow(token_ids, end, num_prompt_tokens, self._judge)
        return end - begin

    def _judge(self, num_right: int, is_right: bool) -> None:
        kind = _kind_of(num_right)
        self._of_request.add(kind, is_right)
        self._of_service.add(kind, is_right)

    def draft(self, token_ids: "array[int]", most: int, least_chance: float) -> list[int]:
        """Return drafts of the tokens that follow, each of which is accepted with at least this probability.

        Returns none while tokens are unread.
        """
        if not self._ngrams.place or self._ngrams.num_seen < len(token_ids):
            return []
        chance, number, num_right = 1.0, 0, self._ngrams.num_right
        while number < most:
            chance *= self._find_chance(_kind_of(num_right + number))
            if chance < least_chance:
                break
            number += 1
        return self._ngrams.draft(token_ids, number)

    def _find_chance(self, kind: int) -> float:
        """Return how likely a guess of this kind is right."""
        service, request = self._of_service, self._of_request
        of_service = (service.num_right[kind] + 1) / (service.total[kind] + 2)
        return (request.num_right[kind] + _WEIGHT * of_service) / (request.total[kind] + _WEIGHT)


def _kind_of(num_right: int) -> int:
    return min(num_right.bit_length(), _NUM_KINDS - 1)
