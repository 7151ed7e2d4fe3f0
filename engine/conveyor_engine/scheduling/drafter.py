"""Drafts the next tokens of one request, and estimates how many of them the model would accept. Used by `speculation`.

Each token of an answer is compared with the guess that its drafter had, whether or not a step computed the guess as a
draft. So the estimate costs the device nothing, and is there before the first draft. Pure.
"""

from array import array
from collections.abc import Sequence
from typing import Final

from conveyor_engine.scheduling.ngrams import NGrams

_NUM_KINDS: Final = 7
KEPT_OF_REQUEST: Final = 32  # guesses of one kind; then both counts are halved, so that old guesses count less
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


class DraftState:
    """What the draft model has read of one request, and how often it was right."""

    __slots__ = ("admission", "lag", "num_read", "num_right", "rates")

    def __init__(self, lag: int) -> None:
        self.lag = lag  # of a head, see `ModelDrafts`
        self.admission = -1  # of the request when `num_read` was counted
        self.num_read = 0  # its first tokens, whose keys the draft model has
        self.num_right = 0  # guesses that were right in a row
        self.rates = Rates(KEPT_OF_REQUEST)


class Drafter:
    """The guesses for one request.

    With a prediction, the n-grams are those of a text of its own: a token that is never guessed, the prediction, and
    the request's tokens. The answer is guessed to begin as the prediction does.
    """

    __slots__ = ("_ngrams", "_of_request", "_of_service", "_offset", "_prediction", "_text", "num_predicted")

    def __init__(self, num_tokens: int, of_service: Rates, prediction: Sequence[int] = ()) -> None:
        """num_tokens: the most tokens of the request. of_service: the rates of all requests together."""
        self._prediction = prediction
        self._text = array("I", (0,)) if prediction else None  # what is read
        self._offset = len(prediction) + 1 if prediction else 0
        self._ngrams = NGrams(self._offset + num_tokens)
        self._of_service = of_service
        self._of_request = Rates(KEPT_OF_REQUEST)
        self.num_predicted = 0, 0
        """How many drafts from the prediction were accepted, and rejected."""

    def count_unread(self, num_tokens: int) -> int:
        """Return how many tokens `read` has not read yet, if the request has so many."""
        return self._offset + num_tokens - self._ngrams.num_seen

    def read(self, token_ids: "array[int]", num_prompt_tokens: int, most: int) -> int:
        """Read the request's new tokens, at most so many. Returns how many it has read."""
        begin, answer = self._ngrams.num_seen, self._offset + num_prompt_tokens
        end = min(self._offset + len(token_ids), begin + most)
        text = self._extend(token_ids, end)
        if self._offset and begin < answer <= end:
            self._ngrams.follow(text, answer, answer, self._judge)
            self._ngrams.place, self._ngrams.num_right = 1, 0
        self._ngrams.follow(text, end, answer, self._judge)
        return end - begin

    def _extend(self, token_ids: "array[int]", end: int) -> "array[int]":
        """Return the text of the n-grams, which has at least its first `end` tokens."""
        text = self._text
        if text is None:
            return token_ids
        if len(text) < end:
            text.extend(self._prediction[len(text) - 1 : end - 1])
        if len(text) < end:
            text.extend(token_ids[len(text) - self._offset : end - self._offset])
        return text

    def _judge(self, num_right: int, is_right: bool) -> None:
        kind = kind_of(num_right)
        self._of_request.add(kind, is_right)
        self._of_service.add(kind, is_right)

    def draft(self, token_ids: "array[int]", most: int, least_chance: float) -> list[int]:
        """Return drafts of the tokens that follow, each of which is accepted with at least this probability.

        Returns none while tokens are unread.
        """
        text, place = token_ids if self._text is None else self._text, self._ngrams.place
        if not place or self.count_unread(len(token_ids)) > 0:
            return []
        if place < self._offset:
            most = min(most, self._offset - place)  # so that all drafts of a step are predicted, or none
        chance, number, num_right = 1.0, 0, self._ngrams.num_right
        while number < most:
            chance *= find_chance(kind_of(num_right + number), self._of_request, self._of_service)
            if chance < least_chance:
                break
            number += 1
        return self._ngrams.draft(text, number)

    def count(self, num_accepted: int, num_rejected: int) -> None:
        """Add to `num_predicted` if the last drafts were predicted. Call it before the next `read`."""
        if self._ngrams.place < self._offset:
            accepted, rejected = self.num_predicted
            self.num_predicted = accepted + num_accepted, rejected + num_rejected


def find_chance(kind: int, request: Rates, service: Rates) -> float:
    """Return how likely a guess of this kind is right."""
    of_service = (service.num_right[kind] + 1) / (service.total[kind] + 2)
    return (request.num_right[kind] + _WEIGHT * of_service) / (request.total[kind] + _WEIGHT)


def kind_of(num_right: int) -> int:
    """Return the kind of a guess after so many right ones."""
    return min(num_right.bit_length(), _NUM_KINDS - 1)
