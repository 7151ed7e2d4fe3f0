"""Log probabilities in the formats of OpenAI and vLLM: whole for an event, in pieces for a body.

Used by `completions`, `chat` and `responses`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from conveyor_engine.tasks.generate.serving.content_tokens import Token
from conveyor_engine.text.tokenizer import Tokenizer
from conveyor_engine.wire.request import TokenLogprobs

T = TypeVar("T")

_PIECE_TOKENS = 64
LOWEST = -9999.0  # stands for minus infinity, which JSON cannot represent


@dataclass(frozen=True, slots=True)
class TokenNames:
    """Names tokens by their text, or all by their ids. Ids distinguish tokens with equal text."""

    tokenizer: Tokenizer
    as_ids: bool
    with_chosen: bool = False  # whether the alternatives in chat always include the chosen token, as in vLLM

    def text(self, token_id: int) -> str:
        """Return the name of one token."""
        if self.as_ids:
            return f"token_id:{token_id}"
        return self.tokenizer.token_bytes(token_id).decode(errors="replace")


class PromptLogprob(msgspec.Struct):
    """A token of a prompt, or an alternative to it."""

    logprob: float | None
    rank: int
    decoded_token: str


class CompletionLogprobs(msgspec.Struct):
    """The log probabilities of a completion. Each list has one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]  # None for the first token of a prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(msgspec.Struct):
    """An alternative to a token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    """The chosen token and its most likely alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """The log probabilities of one choice, or of one event."""

    content: list[ChatTokenLogprob]
    refusal: None = None


def completion_logprobs(names: TokenNames, tokens: Sequence[Token]) -> CompletionLogprobs:
    """Return the entries for the tokens. The chosen token is always among the top ones, also if none are requested."""
    return CompletionLogprobs(
        tokens=[names.text(t.logprobs.token_id) for t in tokens],
        token_logprobs=[_bounded(t.logprobs.logprob) for t in tokens],
        top_logprobs=[_top_by_text(names, t) for t in tokens],
        text_offset=[t.start for t in tokens],
    )


def chat_logprobs(names: TokenNames, tokens: Sequence[Token]) -> ChatLogprobs:
    """Return the entries for the tokens, with as many alternatives as were requested."""
    return ChatLogprobs([build_chat_logprob(names, token) for token in tokens])


def completion_logprobs_pieces(names: TokenNames, tokens: Sequence[Token]) -> Iterator[bytes]:
    """Yield the JSON of `completion_logprobs`, a few tokens at a time."""
    yield b'{"tokens":'
    yield from _array(tokens, lambda t: names.text(t.logprobs.token_id))
    yield b',"token_logprobs":'
    yield from _array(tokens, lambda t: _bounded(t.logprobs.logprob))
    yield b',"top_logprobs":'
    yield from _array(tokens, lambda t: _top_by_text(names, t))
    yield b',"text_offset":'
    yield from _array(tokens, lambda t: t.start)
    yield b"}"


def chat_logprobs_pieces(names: TokenNames, tokens: Sequence[Token]) -> Iterator[bytes]:
    """Yield the JSON of `chat_logprobs`, a few tokens at a time."""
    yield b'{"content":'
    yield from _array(tokens, lambda t: build_chat_logprob(names, t))
    yield b',"refusal":null}'


def prompt_logprobs_pieces(names: TokenNames, logprobs: Sequence[TokenLogprobs]) -> Iterator[bytes]:
    """Yield a prompt's log probabilities as JSON in vLLM's format.

    Each token has an object whose keys are token ids. The first token has null instead.
    """
    yield b'"prompt_logprobs":'
    yield from _array([None, *logprobs], lambda each: None if each is None else _by_id(names, each))


def _by_id(names: TokenNames, logprobs: TokenLogprobs) -> dict[str, PromptLogprob]:
    ids, values = logprobs.top_token_ids, logprobs.top_logprobs
    others = {str(ids[i]): PromptLogprob(_bounded(values[i]), i + 1, names.text(ids[i])) for i in range(len(ids))}
    own = PromptLogprob(_bounded(logprobs.logprob), logprobs.rank, names.text(logprobs.token_id))
    return {str(logprobs.token_id): own, **others}


def _bounded(logprob: float | None) -> float | None:
    return None if logprob is None else max(LOWEST, logprob)


def _array(tokens: Sequence[T], item: Callable[[T], object]) -> Iterator[bytes]:
    yield b"["
    for start in range(0, len(tokens), _PIECE_TOKENS):
        items = msgspec.json.encode([item(token) for token in tokens[start : start + _PIECE_TOKENS]])
        yield (b"," if start else b"") + items[1:-1]
    yield b"]"


def build_chat_logprob(names: TokenNames, token: Token) -> ChatTokenLogprob:
    """Return the entry for one token."""
    logprobs = token.logprobs
    pairs = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
    top = [_top(names, token_id, logprob) for token_id, logprob in pairs]
    assert logprobs.logprob is not None
    chosen = _top(names, logprobs.token_id, logprobs.logprob)
    if names.with_chosen and logprobs.token_id not in logprobs.top_token_ids:
        top.append(chosen)
    return ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top)


def _top(names: TokenNames, token_id: int, logprob: float) -> TopLogprob:
    return TopLogprob(names.text(token_id), max(LOWEST, logprob), list(names.tokenizer.token_bytes(token_id)))


def _top_by_text(names: TokenNames, token: Token) -> dict[str, float] | None:
    """Return the top log probabilities by the tokens' text; None for a prompt's first token.

    The chosen token comes first, as in vLLM. If two tokens have equal text, such as parts of characters, the more
    likely one counts.
    """
    logprobs = token.logprobs
    if logprobs.logprob is None:
        return None
    top: dict[str, float] = {}
    pairs = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
    for token_id, logprob in ((logprobs.token_id, logprobs.logprob), *pairs):
        name = names.text(token_id)
        top[name] = max(top.get(name, LOWEST), logprob)
    return top
