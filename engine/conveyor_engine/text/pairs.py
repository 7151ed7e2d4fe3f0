"""Encodes two texts, such as a query and a document, as one prompt, for models that read both at once.

Used by the workers of `serving.preparing`. Pairs are encoded and truncated as in transformers. Many pairs share the
first text, so it is encoded only once.
"""

from dataclasses import dataclass

from tokenizers import Encoding

from conveyor_engine.errors import InvalidRequest, context_exceeded
from conveyor_engine.text.tokenizer import SHORTEN, Side, Tokenizer, Truncation


@dataclass(frozen=True, slots=True)
class Pair:
    """The tokens of a pair. `token_types`: which of the two texts each token belongs to, in the model's encoding."""

    token_ids: list[int]
    token_types: list[int]


class PairEncoder:
    """Encodes pairs that share their first text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        first: str,
        max_tokens: int,
        *,
        param: str,
        truncation: Truncation | None = None,
    ) -> None:
        """max_tokens: limit of a pair, including special tokens. param: the request's field with the first text.

        Raises InvalidRequest if the text is too long.
        """
        self._tokenizer, self._text, self._max_tokens = tokenizer, first, max_tokens
        wanted = max_tokens if truncation is None else truncation.max_tokens
        self._room = wanted - tokenizer.num_pair_tokens
        if self._room < 0:
            raise InvalidRequest(
                f"a pair of texts has {tokenizer.num_pair_tokens} special tokens, more than the limit of {wanted}",
                param="truncate_prompt_tokens",
            )
        self._cut: Side | None = None if truncation is None else truncation.side
        self._first = tokenizer.encode_part(first, self._limit, param, self._cut)

    @property
    def _limit(self) -> int:
        """Return how many tokens of one text to encode at most.

        With truncation, this is one token more than fits. So `_fit` sees which text is longer, unless each of the two
        texts alone is too long.
        """
        return self._max_tokens if self._cut is None else self._room + 1

    def encode(self, second: str, *, param: str, max_second_tokens: int | None = None) -> Pair:
        """Return the pair with this second text, of which only the first `max_second_tokens` tokens are used.

        Raises InvalidRequest with the field `param` if the pair is too long and truncation is not requested.
        """
        if max_second_tokens is not None and max_second_tokens < self._limit:
            part = self._tokenizer.encode_part(second, max_second_tokens, param, "right")
        else:
            part = self._tokenizer.encode_part(second, self._limit, param, self._cut)
        joined = self._tokenizer.join(*self._fit(part))
        if len(joined.ids) > self._max_tokens:
            raise context_exceeded(
                self._max_tokens,
                f"{param} has {len(joined.ids)} tokens with the text that it is compared with. {SHORTEN} Or send "
                "truncate_prompt_tokens.",
                param=param,
            )
        return Pair(list(joined.ids), list(joined.type_ids))

    def _fit(self, second: Encoding) -> tuple[Encoding, Encoding]:
        """Truncate both texts if requested: the longer one first, then both equally (transformers' longest_first)."""
        if self._cut is None or len(self._first.ids) + len(second.ids) <= self._room:
            return self._first, second
        num_first, num_second = split_room(self._room, len(self._first.ids), len(second.ids))
        second.truncate(num_second, direction=self._cut)
        if num_first == len(self._first.ids):
            return self._first, second
        return self._tokenizer.encode_part(self._text, num_first, "", self._cut), second


def split_room(room: int, num_first: int, num_second: int) -> tuple[int, int]:
    """Divide `room` tokens between two texts that do not fit (like tokenizers' truncate_encodings)."""
    shorter = min(num_first, num_second)
    left = (min(shorter, room // 2), room - min(shorter, room // 2))
    return left if num_first <= num_second else left[::-1]
