"""Log probabilities in OpenAI's two shapes, whole for an event, in pieces for a body. Used by `completions`, `chat`."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from conveyor_engine.serving.http.choice import Token
from conveyor_engine.text.tokenizer import Tokenizer

_PIECE_TOKENS = 64
LOWEST = -9999.0  # stands for minus infinity, which JSON cannot say


class CompletionLogprobs(msgspec.Struct):
    """One entry per token in each list."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TopLogprob(msgspec.Struct):
    """An alternative for a token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    """The chosen token and its likeliest alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """The log probabilities of one choice, or of one event."""

    content: list[ChatTokenLogprob]
    refusal: None = None


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[Token]) -> CompletionLogprobs:
    """The chosen token is among the top ones even if it was not one of the likeliest, or if none were asked for."""
    return CompletionLogprobs(
        tokens=[_text(tokenizer, t.logprobs.token_id) for t in tokens],
        token_logprobs=[max(LOWEST, t.logprobs.logprob) for t in tokens],
        top_logprobs=[_top_by_text(tokenizer, t) for t in tokens],
        text_offset=[t.start for t in tokens],
    )


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[Token]) -> ChatLogprobs:
    """As many alternatives as the engine was asked for."""
    return ChatLogprobs([_chat_token(tokenizer, token) for token in tokens])


def completion_logprobs_pieces(tokenizer: Tokenizer, tokens: Sequence[Token]) -> Iterator[bytes]:
    """The JSON of `completion_logprobs`, a few tokens at a time."""
    yield b'{"tokens":'
    yield from _array(tokens, lambda t: _text(tokenizer, t.logprobs.token_id))
    yield b',"token_logprobs":'
    yield from _array(tokens, lambda t: max(LOWEST, t.logprobs.logprob))
    yield b',"top_logprobs":'
    yield from _array(tokens, lambda t: _top_by_text(tokenizer, t))
    yield b',"text_offset":'
    yield from _array(tokens, lambda t: t.start)
    yield b"}"


def chat_logprobs_pieces(tokenizer: Tokenizer, tokens: Sequence[Token]) -> Iterator[bytes]:
    """The JSON of `chat_logprobs`, a few tokens at a time."""
    yield b'{"content":'
    yield from _array(tokens, lambda t: _chat_token(tokenizer, t))
    yield b',"refusal":null}'


def _array(tokens: Sequence[Token], item: Callable[[Token], object]) -> Iterator[bytes]:
    yield b"["
    for start in range(0, len(tokens), _PIECE_TOKENS):
        items = msgspec.json.encode([item(token) for token in tokens[start : start + _PIECE_TOKENS]])
        yield (b"," if start else b"") + items[1:-1]
    yield b"]"


def _chat_token(tokenizer: Tokenizer, token: Token) -> ChatTokenLogprob:
    logprobs = token.logprobs
    pairs = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
    top = [_top(tokenizer, token_id, logprob) for token_id, logprob in pairs]
    chosen = _top(tokenizer, logprobs.token_id, logprobs.logprob)
    return ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top)


def _top(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    data = tokenizer.token_bytes(token_id)
    return TopLogprob(data.decode(errors="replace"), max(LOWEST, logprob), list(data))


def _top_by_text(tokenizer: Tokenizer, token: Token) -> dict[str, float]:
    """Two tokens of the same text (pieces of characters) share an entry: the likelier one's, as it comes first."""
    logprobs = token.logprobs
    top: dict[str, float] = {}
    pairs = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
    for token_id, logprob in (*pairs, (logprobs.token_id, logprobs.logprob)):
        top.setdefault(_text(tokenizer, token_id), max(LOWEST, logprob))
    return top


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode(errors="replace")
