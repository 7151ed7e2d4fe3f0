"""Converts text to token ids and back, with the model directory's tokenizer.json and chat template. Decodes streams.

Used by the API process and its workers, which must not import torch. So only `tokenizers` is used, not transformers.
Workers render and encode (`serving.preparing`). The API process decodes, which is cheap for each token. `detokenizer`
adds stop strings.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from tokenizers import Encoding
from tokenizers import Tokenizer as _FastTokenizer

from conveyor_engine.errors import InvalidRequest, ModelError, context_exceeded
from conveyor_engine.model_files import read_object
from conveyor_engine.text.chat_template import RENDERING, ChatTemplate, Rendering, TooManyCharacters
from conveyor_engine.text.stream import TextStream
from conveyor_protocol.failure_reasons import FailureReason

_CHARACTERS_PER_TOKEN = 4  # about the average of natural language
# A text that is cut inside a token may have more tokens than the same part of the whole text has. The difference is
# assumed to be below this number.
_CUT_TOKENS_MAX = 100
PROMPT_TAIL_TOKENS = 6  # enough context for a decoder to decide whether a space or a byte follows
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # SentencePiece's token for a byte

SHORTEN: Final = "Please reduce the length of the input prompt."  # vLLM's text, which clients look for

Side = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class Truncation:
    """How a prompt is truncated: to `max_tokens` tokens, including special ones. Tokens on `side` are dropped."""

    max_tokens: int
    side: Side

    def cut(self, token_ids: list[int]) -> list[int]:
        """Return at most `max_tokens` of the tokens."""
        if self.side == "right":
            return token_ids[: self.max_tokens]
        return token_ids[max(0, len(token_ids) - self.max_tokens) :]


class Tokenizer:
    """The tokenizer of one model directory. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        """Read the tokenizer and the chat template, which is not compiled yet.

        Raises ModelError if the directory, its tokenizer.json or its chat template cannot be read.
        """
        if not directory.is_dir():
            raise ModelError(
                f"{directory} is not a directory, so it has no model", reason=FailureReason.MODEL_NOT_FOUND
            )
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{directory} has no tokenizer.json; save the tokenizer in the fast (tokenizers) format")
        try:
            self._fast = _FastTokenizer.from_file(str(path))
        except Exception as error:  # `tokenizers` raises bare Exception
            raise ModelError(f"{path} cannot be read: {error}") from error
        self._directory = directory
        self._fast.no_truncation()
        self._fast.no_padding()
        self._byte_of = _byte_level_alphabet() if '"ByteLevel"' in path.read_text() else None
        self._longest_token = max((len(piece) for piece in self._fast.get_vocab()), default=1)
        self._chat_template = read_chat_template(directory)

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids, including added tokens."""
        return self._fast.get_vocab_size()

    def encode(
        self,
        text: str,
        max_tokens: int,
        *,
        add_special_tokens: bool = True,
        param: str = "prompt",
        truncation: Truncation | None = None,
    ) -> list[int]:
        """Return the token ids. `param`: the request's field with the text.

        Raises InvalidRequest as soon as a beginning of the text clearly exceeds `max_tokens` tokens, because tokenizing
        takes 100 bytes or more of memory for each character. A text that passes may still have too many tokens.
        """
        if truncation is not None:
            return self._encode_truncated(text, truncation, add_special_tokens=add_special_tokens)
        self._check_length(text, max_tokens, param)
        return list(self._encode(text, add_special_tokens=add_special_tokens).ids)

    def _check_length(self, text: str, max_tokens: int, param: str) -> None:
        for length in _lengths_to_try(max_tokens, len(text)):
            if len(self._encode(text[:length]).ids) > max_tokens + _CUT_TOKENS_MAX:
                raise too_long(f"more than {max_tokens}", max_tokens, param)

    def encode_part(self, text: str, max_tokens: int, param: str, cut: Side | None = None) -> Encoding:
        """Encode one text of a pair, without special tokens, for `join`. Raises InvalidRequest as `encode` does.

        cut: the side on which tokens beyond `max_tokens` are dropped. Text that would be dropped is not encoded.
        """
        if cut is None:
            self._check_length(text, max_tokens, param)
            return self._encode(text)
        encoding = self._encode_end(text, max_tokens + _CUT_TOKENS_MAX, cut)
        encoding.truncate(max_tokens, direction=cut)
        return encoding

    def cut(self, text: str, num_tokens: int) -> str:
        """Return the beginning of the text that has at most this number of tokens."""
        encoding = self._encode_end(text, num_tokens + _CUT_TOKENS_MAX, "right", spans=True)
        if len(encoding.ids) <= num_tokens:
            return text
        encoding.truncate(num_tokens)
        return text[: max((end for _, end in encoding.offsets), default=0)]

    def encode_spans(
        self,
        text: str,
        max_tokens: int,
        param: str,
        truncation: Truncation | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> Encoding:
        """Encode a text with the position of each token in it. Raises InvalidRequest as `encode` does.

        With a truncation, always drops the end and always adds special tokens.
        """
        if truncation is None:
            self._check_length(text, max_tokens, param)
            return self._encode(text, add_special_tokens=add_special_tokens, spans=True)
        room = max(0, truncation.max_tokens - int(self._fast.num_special_tokens_to_add(False)))
        encoding = self._encode_end(text, room + _CUT_TOKENS_MAX, "right", spans=True)
        encoding.truncate(room)
        return self._fast.post_process(encoding, add_special_tokens=True)

    def find_piece(self, token_id: int) -> str:
        """Return the token as the vocabulary spells it; "" for an unknown id."""
        return self._fast.id_to_token(token_id) or ""

    @cached_property
    def unknown_id(self) -> int | None:
        """Return the id of the token for text that is not in the vocabulary; None if there is no such token."""
        return self.find_special_id("unk_token")

    @cached_property
    def padding_id(self) -> int | None:
        """Return the id of the token for padding; None if there is no such token."""
        return self.find_special_id("pad_token")

    @cached_property
    def _config(self) -> dict[str, Any]:
        return read_object(self._directory / "tokenizer_config.json")

    def find_special_id(self, name: str) -> int | None:
        """Return the id of the special token with this name in the tokenizer's files; None if they do not have it."""
        named = _special_tokens(self._directory, self._config)
        return self._fast.token_to_id(named[name]) if name in named else None

    def join(self, first: Encoding, second: Encoding) -> Encoding:
        """Join both texts with special tokens between and around them. Return the tokens and their types."""
        return self._fast.post_process(first, second, add_special_tokens=True)

    @property
    def num_pair_tokens(self) -> int:
        """Return the number of special tokens that `join` adds."""
        return int(self._fast.num_special_tokens_to_add(True))

    def _encode_truncated(self, text: str, truncation: Truncation, *, add_special_tokens: bool) -> list[int]:
        """Return the text's first or last tokens with the special tokens around them, truncated as in transformers."""
        num_special = self._fast.num_special_tokens_to_add(False) if add_special_tokens else 0
        room = max(0, truncation.max_tokens - num_special)
        encoding = self._encode_end(text, room + _CUT_TOKENS_MAX, truncation.side)
        encoding.truncate(room, direction=truncation.side)
        if add_special_tokens:
            encoding = self._fast.post_process(encoding, add_special_tokens=True)
        return truncation.cut(list(encoding.ids))

    def _encode_end(self, text: str, num_tokens: int, lost: Side, *, spans: bool = False) -> Encoding:
        """Encode just enough of the text for `num_tokens` tokens, or the whole text if it has fewer.

        `lost`: the side whose tokens are dropped. The encoded part is at the other side.
        """
        for length in _lengths_to_try(num_tokens, len(text)):
            end = text[:length] if lost == "right" else text[-length:]
            if len((encoding := self._encode(end, spans=spans)).ids) >= num_tokens:
                return encoding
        return self._encode(text, spans=spans)

    def _encode(self, text: str, *, add_special_tokens: bool = False, spans: bool = False) -> Encoding:
        encode = self._fast.encode_batch if spans else self._fast.encode_batch_fast
        return encode([text], add_special_tokens=add_special_tokens)[0]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int,
        variables: Mapping[str, Any] | None = None,
        rendering: Rendering = RENDERING,
    ) -> str:
        """Return the rendered text of a chat, in which the template writes the special tokens.

        Raises InvalidRequest.
        """
        if self._chat_template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        max_characters = max_tokens * self._longest_token
        try:
            return self._chat_template.render(messages, max_characters, variables or {}, rendering)
        except TooManyCharacters:
            problem = f"the model's chat template makes more than {max_characters} characters of your messages"
            raise context_exceeded(max_tokens, f"{problem}. {SHORTEN}", param="messages") from None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens. Raises InvalidRequest."""
        try:
            text: str = self._fast.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:  # `tokenizers` raises bare Exception; a panic is a BaseException of its own
            raise InvalidRequest(f"the model's tokenizer cannot decode these tokens: {error}", param="tokens") from None
        return text

    def find_id(self, piece: str) -> int | None:
        """Return the id of the token that the vocabulary spells like this; None if there is no such token."""
        token_id: int | None = self._fast.token_to_id(piece)
        return token_id

    def describe(self) -> dict[str, Any]:
        """Return the content of tokenizer_config.json with the chat template, as vLLM's /tokenizer_info does.

        Tokens are given as texts, and names of files are left out.
        """
        shown = {key: value for key, value in self._config.items() if not key.endswith("_file")}
        described: dict[str, Any] = _in_texts(shown)
        described["tokenizer_class"] = str(shown.get("tokenizer_class") or "PreTrainedTokenizerFast")
        return described | ({"chat_template": source} if (source := self.chat_template_source) else {})

    @property
    def chat_template_source(self) -> str:
        """Return the text of the model's chat template; "" if it has none."""
        return self._chat_template.source if self._chat_template else ""

    def decode_stream(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> TextStream:
        """Return a decoder for the answer to this prompt."""
        return TextStream(self._fast, prompt_token_ids[-PROMPT_TAIL_TOKENS:], skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the token's bytes without regard to its context.

        Returns the name of a special token, and b"" for an unknown id.
        """
        piece = self._fast.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_of is not None:
            encoded = [self._byte_of.get(character) for character in piece]
            return bytes(b for b in encoded if b is not None) if None not in encoded else piece.encode()
        if (byte := _BYTE.fullmatch(piece)) is not None:
            return bytes.fromhex(byte[1])
        return piece.replace("▁", " ").encode()


def _lengths_to_try(num_tokens: int, num_characters: int) -> Iterator[int]:
    """Yield growing lengths, in characters, for attempts to encode a part of a text that has `num_tokens` tokens.

    The caller stops when a part has enough tokens. Each length is twice the previous one and below the text's length,
    so an attempt takes at most about twice the memory that the tokens need.
    """
    length = _CHARACTERS_PER_TOKEN * num_tokens
    while 0 < length < num_characters:
        yield length
        length *= 2


def too_long(num_tokens: int | str, max_model_len: int, param: str) -> InvalidRequest:
    """Return the error for a prompt in the field `param` that is too long, or that leaves no room for an answer."""
    answer = ", and the answer needs at least one more" if param in ("prompt", "messages") else ""
    problem = f"your prompt contains {num_tokens} input tokens{answer}. {SHORTEN}"
    return context_exceeded(max_model_len, problem, param=param)


def read_chat_template(directory: Path) -> ChatTemplate | None:
    """Return the model's chat template, not compiled yet; None if it has none.

    Raises ModelError if it cannot be read.
    """
    try:
        config = read_object(directory / "tokenizer_config.json")
        source = _chat_template_source(directory, config)
        return ChatTemplate(source, _special_tokens(directory, config)) if source else None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        what = f"the chat template in {directory}, or what tokenizer_config.json says of it, is not usable"
        raise ModelError(f"{what}: {type(error).__name__}: {error}") from error


def _chat_template_source(directory: Path, config: Mapping[str, Any]) -> str | None:
    """Find the chat template as transformers does: the file first, then the config's string or named templates."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    source = config.get("chat_template") or read_object(directory / "chat_template.json").get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    return source


def _in_texts(value: Any) -> Any:
    """Return the JSON with each token's object replaced by its text."""
    if isinstance(value, dict):
        return value["content"] if "content" in value else {key: _in_texts(each) for key, each in value.items()}
    return list(map(_in_texts, value)) if isinstance(value, list) else value


def _special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return bos_token, eos_token and so on by name. The files have a string or {"content": string} for each."""
    both = {**read_object(directory / "special_tokens_map.json"), **config}
    named = {key: value for key, value in both.items() if key.endswith("_token")}
    contents = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: value for key, value in contents.items() if isinstance(value, str)}


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte for each of GPT-2's characters.

    A printable byte has the character with its own number. The other bytes have the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}
