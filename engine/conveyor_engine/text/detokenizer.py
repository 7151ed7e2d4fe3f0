"""Decodes one answer token by token and cuts it at stop strings. Text that may begin a stop string is held back.

`serving.http` creates one for each choice. In static mode, `scheduling` creates one for each request with stop strings.
Pure except for the tokenizer's decode stream. Stores only text that is not shown yet.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from conveyor_engine.text.stop_strings import StopMatcher, StopStrings
from conveyor_engine.text.tokenizer import Tokenizer

_NO_STOP_STRINGS = StopStrings(())


class Piece(NamedTuple):
    """The new visible text after a push.

    token_starts: the start, in characters of the answer, of each token that is now completely shown.
    """

    text: str
    token_starts: list[int]
    stopped: bool = False  # a stop string was found, and the answer ends here


class Detokenizer:
    """Decodes one answer.

    Invariant: the shown text never contains a stop string, nor the beginning of one that may still become complete.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stop: StopStrings = _NO_STOP_STRINGS,
        min_tokens: int = 0,
        *,
        shows_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """Stop strings count only in text that begins after the first `min_tokens` tokens.

        `shows_stop`: the text includes the stop string, and nothing is held back.
        """
        self._stream = tokenizer.decode_stream(prompt_token_ids, skip_special_tokens=skip_special_tokens)
        self._shows_stop = shows_stop
        self._matcher = StopMatcher(stop)
        self._min_tokens = min_tokens
        self.num_tokens = 0  # decoded so far, including the one that completed a stop string
        self._hidden = ""  # text that is not shown yet
        self._shown = 0  # number of characters that are shown
        self._last_start = 0  # start of the first token that is not completely shown
        self._ends: deque[int] = deque()  # ends of the tokens that are not completely shown, in characters

    @property
    def num_characters(self) -> int:
        """Return the number of characters shown so far."""
        return self._shown

    @property
    def stop_string(self) -> str:
        """Return the stop string that was found."""
        return self._matcher.found

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Decode the next tokens. Tokens after a stop string are ignored."""
        for token_id in token_ids:
            text = self._stream.push(token_id)
            self.num_tokens += 1
            self._ends.append(self._shown + len(self._hidden) + len(text))
            if (cut := self._append(text, counts=self.num_tokens > self._min_tokens)) is not None:
                return self._show(cut, stopped=True)
        return self._show(len(self._hidden) - (0 if self._shows_stop else self._matcher.num_held))

    def finish(self) -> Piece:
        """Return the rest of the text, after the last token.

        An incomplete character becomes a replacement character.
        """
        cut = self._append(self._stream.finish(), counts=True)
        return self._show(len(self._hidden)) if cut is None else self._show(cut, stopped=True)

    def _append(self, text: str, *, counts: bool) -> int | None:
        """Append to the hidden text. Returns how much of it to show if a stop string is complete, otherwise None."""
        before = len(self._hidden)
        self._hidden += text
        found = self._matcher.feed(text) if counts else None
        if found is None:
            return None
        end, length = found
        return before + end - (0 if self._shows_stop else length)

    def _show(self, num_characters: int, *, stopped: bool = False) -> Piece:
        text, self._hidden = self._hidden[:num_characters], self._hidden[num_characters:]
        self._shown += len(text)
        starts = []
        while self._ends and self._ends[0] <= self._shown:
            starts.append(self._last_start)
            self._last_start = self._ends.popleft()
        if stopped and self._ends and self._last_start < self._shown:
            starts.append(self._last_start)  # the stop string begins within this token
        return Piece(text, starts, stopped)
