"""Decodes the tokens of one answer piece by piece. Made by `tokenizer`, used through `detokenizer`."""

from collections.abc import Sequence

from tokenizers import Tokenizer as _FastTokenizer

from conveyor_engine.errors import GenerationFailed

_UNFINISHED_TOKENS_MAX = 3  # a character has at most four bytes, and each of its tokens has at least one byte
_PENDING_TOKENS_MAX = 16  # limit on consecutive tokens that each end one character and begin the next
_REPLACEMENT = "\ufffd"  # the decoded form of bytes that are not text, or incomplete


class TextStream:
    """Decodes one answer piece by piece, but never half a character, with or without special tokens.

    It works like `tokenizers.decoders.DecodeStream`: the new text is what tokens add to the text of the tokens before.
    Bytes that can no longer become a character are shown immediately, so few tokens are pending: at most three, or more
    if a token ends one character and begins the next.
    """

    def __init__(self, fast: _FastTokenizer, prompt_tail: Sequence[int], skip_special_tokens: bool) -> None:
        self._fast = fast
        self._skip_special_tokens = skip_special_tokens
        self._context = list(prompt_tail)
        while self._context and self._decode(self._context).startswith(_REPLACEMENT):
            del self._context[0]  # this token begins within a character
        self._context_text = self._decode(self._context)
        self._pending: list[int] = []
        self._num_shown = 0  # shown characters of the pending tokens

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; "" while a character may be unfinished.

        Raises GenerationFailed.
        """
        self._pending.append(token_id)
        shown = ""
        while True:
            text = self._text_of(self._pending)
            is_whole = bool(text) and not text.endswith(_REPLACEMENT)
            if is_whole or len(self._pending) > _PENDING_TOKENS_MAX:
                return shown + self._move_on(text)
            if len(self._pending) <= _UNFINISHED_TOKENS_MAX:
                return shown
            if certain := text.rstrip(_REPLACEMENT)[self._num_shown :]:
                self._num_shown += len(certain)
                return shown + certain
            if self._num_shown:
                return shown
            shown += self._text_of([self._pending.pop(0)])

    def _move_on(self, text: str) -> str:
        """Make the pending tokens the context. Returns the part of their text that is not shown yet."""
        text, self._num_shown = text[self._num_shown :], 0
        self._context, self._pending = self._pending, []
        self._context_text = self._decode(self._context)
        return text

    def finish(self) -> str:
        """Return the text of the pending tokens. Called after the last token."""
        return self._move_on(self._text_of(self._pending)) if self._pending else ""

    def _text_of(self, token_ids: list[int]) -> str:
        """Return the text that these tokens add to the context."""
        text = self._decode(self._context + token_ids)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        return self._decode(token_ids)  # invalid bytes have changed the text before them

    def _decode(self, token_ids: list[int]) -> str:
        try:
            text: str = self._fast.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        except BaseException as error:  # `tokenizers` raises bare Exception; a panic is a BaseException of its own
            raise GenerationFailed(f"the model's tokenizer.json cannot decode the answer: {error}") from error
        return text
