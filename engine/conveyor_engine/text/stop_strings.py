"""Finds stop strings in a text that arrives in pieces, in amortized constant time for each character and stop string.

Used by `detokenizer`, with one matcher for each choice. Pure. Each string is matched with its failure function (Knuth,
Morris and Pratt, 1977), which is computed only as far as some text has matched. So many long strings cost nothing until
an answer begins to match them.
"""

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one request. The request's choices share the computed failure functions."""

    def __init__(self, texts: Sequence[str]) -> None:
        """Compile the stop strings. None of them may be empty."""
        self._patterns = [_Pattern(text) for text in dict.fromkeys(texts)]
        self.by_first: dict[str, list[_Pattern]] = {}
        for pattern in self._patterns:
            self.by_first.setdefault(pattern.text[0], []).append(pattern)


class StopMatcher:
    """The state of matching one text with each stop string."""

    def __init__(self, stops: StopStrings) -> None:
        self._by_first = stops.by_first
        self.found = ""  # the stop string that the text completed
        self._matched: dict[_Pattern, int] = {}  # how many characters of each match the end of the text; never 0

    @property
    def num_held(self) -> int:
        """Return how many characters at the end of the text may begin a stop string."""
        return max(self._matched.values(), default=0)

    def feed(self, text: str) -> tuple[int, int] | None:
        """Return the first stop string that the text completes, as (characters of `text` up to its end, its length).

        If several end at the same character, the longest counts. After one is found, `feed` must not be called again.
        """
        if not self._by_first:
            return None
        for index, character in enumerate(text):
            if (self._matched or character in self._by_first) and (length := self._advance(character)):
                return index + 1, length
        return None

    def _advance(self, character: str) -> int:
        """Return the length of the longest stop string that ends with this character, or 0."""
        before, self._matched = self._matched, {}
        for pattern in self._by_first.get(character, ()):
            if pattern not in before:
                self._matched[pattern] = 1
        for pattern, length in before.items():
            if now := pattern.advance(length, character):
                self._matched[pattern] = now
        complete = (pattern.text for pattern, length in self._matched.items() if length == len(pattern.text))
        self.found = max(complete, key=len, default="")
        return len(self.found)


class _Pattern:
    """One stop string. `_borders[i]`: length of the longest proper border of its first i + 1 characters."""

    __slots__ = ("_borders", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._borders = [0]

    def advance(self, matched: int, character: str) -> int:
        """Return how many characters match after `character`, if `matched` characters (at least one, not all) matched
        before."""
        if len(self._borders) < matched:
            self._borders.append(self._extend(self._borders[-1], self.text[matched - 1]))
        return self._extend(matched, character)

    def _extend(self, matched: int, character: str) -> int:
        while self.text[matched] != character:
            if not matched:
                return 0
            matched = self._borders[matched - 1]
        return matched + 1
