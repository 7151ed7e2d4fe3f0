"""One answer's text as it may be shown: decoded token by token, cut at stop strings, which are held back in time.

Used by `api/`, one per choice. Pure but for the tokenizer's decode stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from conveyor_engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """What may be shown after a push: new text, and how many more tokens lie wholly within the text shown so far."""

    text: str
    num_tokens: int
    stopped: bool = False  # a stop string was found; nothing more will come


class Detokenizer:
    """Invariant: `text[:shown]` never contains a stop string, nor the beginning of one that may still complete."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], stop: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        """Stop strings count only in text that begins after the first `min_tokens` tokens."""
        self._stream = tokenizer.decode_stream(prompt_token_ids)
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._text = ""
        self._ends: list[int] = []  # of each token, in characters of the text
        self._shown = 0
        self._shown_tokens = 0
        self._search_from = 0

    @property
    def num_tokens(self) -> int:
        """Tokens taken, up to the one that completed a stop string."""
        return len(self._ends)

    def start(self, index: int) -> int:
        """Where a token's text begins, in characters of the answer."""
        return self._ends[index - 1] if index else 0

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Takes the next tokens; after a stop string was found the rest of them is ignored."""
        for token_id in token_ids:
            self._text += self._stream.push(token_id)
            self._ends.append(len(self._text))
            if len(self._ends) <= self._min_tokens:
                self._search_from = len(self._text)
            elif (cut := self._find_stop()) is not None:
                return self._show(cut, stopped=True)
        return self._show(len(self._text) - self._held_back())

    def finish(self) -> Piece:
        """All that was held back: no more tokens will come. An unfinished character is a replacement character."""
        self._text += self._stream.finish()
        cut = self._find_stop()
        return self._show(len(self._text)) if cut is None else self._show(cut, stopped=True)

    def _find_stop(self) -> int | None:
        """Where the first stop string begins."""
        if not self._stop:
            return None
        found = [index for stop in self._stop if (index := self._text.find(stop, self._search_from)) >= 0]
        self._search_from = max(self._search_from, len(self._text) - max(map(len, self._stop)) + 1)
        return min(found) if found else None

    def _held_back(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        held = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._text) - self._shown), held, -1):
                if self._text.endswith(stop[:length]):
                    held = length
                    break
        return held

    def _show(self, end: int, *, stopped: bool = False) -> Piece:
        text, before = self._text[self._shown : end], self._shown_tokens
        while self._shown_tokens < len(self._ends) and self._ends[self._shown_tokens] <= end:
            self._shown_tokens += 1
        if stopped and self._shown_tokens < len(self._ends) and self.start(self._shown_tokens) < end:
            self._shown_tokens += 1  # the stop string begins within this token
        self._shown = end
        return Piece(text, self._shown_tokens - before, stopped)
