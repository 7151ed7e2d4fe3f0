"""Guesses a request's next tokens: those that followed where its last tokens occurred before, in prompt or answer.

Used by `speculation`. This is prompt lookup (Saxena, 2023), as in vLLM and llama.cpp, with a hash table of the places
in place of a search: a token costs the same however long the text is. Pure.
"""

from array import array
from collections.abc import Callable
from typing import Final

LENGTH: Final = 3  # tokens that must be equal before a guess
_TABLE_BITS: Final = 16  # a table has at most 2 ** 16 places of 4 bytes; in longer texts, later places replace others
_A, _B, _C = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35  # odd numbers without a pattern, for the hash


class NGrams:
    """The n-grams of one request, and the place from which its next token is guessed."""

    __slots__ = ("_mask", "_places", "num_right", "num_seen", "place")

    def __init__(self, num_tokens: int) -> None:
        """num_tokens: the most tokens of the request."""
        bits = min(num_tokens.bit_length() + 1, _TABLE_BITS)  # at most half of the table is in use
        self._places = array("I")  # by hash: the place after the n-gram; 0: none; empty until the first token is read
        self._mask = (1 << bits) - 1
        self.num_seen = 0  # tokens of the request that are in the table
        self.place = 0  # of the token that is guessed to be the next; 0: there is no guess
        self.num_right = 0  # guesses that were right in a row

    def follow(
        self, token_ids: "array[int]", end: int, num_prompt_tokens: int, judge: Callable[[int, bool], None]
    ) -> None:
        """Read the tokens up to `end`. A guess stays right as long as each token is the next one at its place.

        judge: called for each token of the answer that was guessed, with `num_right` before it, and whether the guess
        was right.
        """
        if end and not self._places:
            self._places.frombytes(bytes(4 * (self._mask + 1)))
        places, mask, place, num_right = self._places, self._mask, self.place, self.num_right
        for index in range(max(self.num_seen, LENGTH - 1), end):
            last = token_ids[index]
            if place:
                is_right = token_ids[place] == last
                if index >= num_prompt_tokens:
                    judge(num_right, is_right)
                place, num_right = (place + 1, num_right + 1) if is_right else (0, 0)
            second, third = token_ids[index - 1], token_ids[index - 2]
            key = (last * _A ^ second * _B ^ third * _C) >> 7 & mask
            if not place and (found := places[key]):
                is_same = token_ids[found - 1] == last and token_ids[found - 2] == second
                place = found if is_same and token_ids[found - 3] == third else 0
            places[key] = index + 1
        self.num_seen, self.place, self.num_right = end, place, num_right

    def draft(self, token_ids: "array[int]", number: int) -> list[int]:
        """Return so many guessed tokens; none if there is no guess.

        Where the text ends, the guess goes on with its own beginning, as a text does that repeats itself.
        """
        if not self.place:
            return []
        found = token_ids[self.place : self.place + number].tolist()
        period = len(token_ids) - self.place
        while len(found) < number:
            found.append(found[len(found) - period])
        return found
