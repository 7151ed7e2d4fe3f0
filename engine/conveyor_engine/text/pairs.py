"""Two texts as one prompt, for models that read both at once: a query and a document.

Used by the workers of `serving.preparing`. As transformers encodes and truncates a pair; the first text, which many
pairs share, is read once.
"""

from dataclasses import dataclass

from tokenizers import Encoding

from conveyor_engine.errors import InvalidRequest, context_exceeded
from conveyor_engine.text.tokenizer import SHORTEN, Side, Tokenizer, Truncation


@dataclass(frozen=True, slots=True)
class Pair:
    """The tokens of a pair, and their types: which of the texts each is of, as the model has them."""

    token_ids: list[int]
    token_types: list[int]


class PairEncoder:
    """Makes pairs with one first text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        first: str,
        max_tokens: int,
        *,
        param: str,
        truncation: Truncation | None = None,
    ) -> None:
        """`max_tokens`: of a pair, special ones included; `param` is the field of the first text.

        Raises InvalidRequest for a text that is too long.
        """
        self._tokenizer, self._text = tokenizer, first
        self._truncation, self._max_tokens = truncation, max_tokens
        wanted = max_tokens if truncation is None else truncation.max_tokens
        self._room = wanted - tokenizer.num_pair_tokens
        if self._room < 0:
            raise InvalidRequest(
                f"a pair of texts has {tokenizer.num_pair_tokens} special tokens, and {wanted} may be left of it",
                param="truncate_prompt_tokens",
            )
        self._cut: Side | None = None if truncation is None else truncation.side
        self._first = tokenizer.encode_part(first, self._limit, param, self._cut)

    @property
    def _limit(self) -> int:
        """Tokens of one text that are read: where it is cut one more than fits, so that it counts as the longer one."""
        return self._max_tokens if self._cut is None else self._room + 1

    def encode(self, second: str, *, param: str, max_second_tokens: int | None = None) -> Pair:
        """The pair with this second text, of which only the first `max_second_tokens` tokens count.

        Raises InvalidRequest, which names the field `param`, if the pair is too long and is not to be cut.
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
    """How many tokens of each text are left of `room`, where both do not fit (tokenizers' truncate_encodings)."""
    shorter = min(num_first, num_second)
    left = (min(shorter, room // 2), room - min(shorter, room // 2))
    return left if num_first <= num_second else left[::-1]
