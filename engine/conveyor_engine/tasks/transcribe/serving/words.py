"""Groups the tokens of a segment into words, as OpenAI's Whisper and transformers do. Pure.

A word begins with a space. In languages that are written without spaces, each token that completes a character ends a
word. Punctuation belongs to the word next to it.
"""

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

_WITHOUT_SPACES: Final = {"zh", "ja", "th", "lo", "my", "yue"}
_OPENING: Final = "\"'\u201c\u00bf\u00a1([{-"
_CLOSING: Final = "\"'.\u3002,\uff0c!\uff01?\uff1f:\uff1a\u201d)]}\u3001"
_BROKEN: Final = "\ufffd"  # stands for a part of a character


@dataclass(slots=True)
class Group:
    """The text of a word. Its tokens are those from `first` up to `end`, without `end`."""

    text: str
    first: int
    end: int


def group_words(tokens: Sequence[int], decode: Callable[[list[int]], str], language: str | None) -> list[Group]:
    """Return the words of these tokens. tokens: without special tokens. language: the code, or None if unknown."""
    groups = _split_characters(tokens, decode)
    if language not in _WITHOUT_SPACES:
        groups = _join_pieces(groups)
    return _join_punctuation(groups)


def _split_characters(tokens: Sequence[int], decode: Callable[[list[int]], str]) -> list[Group]:
    """Split after each token that completes a character. A token may end within a character."""
    groups: list[Group] = []
    whole, first, num_read = decode(list(tokens)), 0, 0
    for end in range(1, len(tokens) + 1):
        text = decode(list(tokens[first:end]))
        broken = num_read + text.find(_BROKEN)
        if _BROKEN not in text or broken >= len(whole) or whole[broken] == _BROKEN:
            groups.append(Group(text, first, end))
            first, num_read = end, num_read + len(text)
    return groups


def _join_pieces(groups: Sequence[Group]) -> list[Group]:
    """Join each group that does not begin with a space to the word before it, unless it is punctuation."""
    words: list[Group] = []
    for group in groups:
        is_punctuation = group.text.strip() in string.punctuation
        if words and not group.text.startswith(" ") and not is_punctuation:
            words[-1].text += group.text
            words[-1].end = group.end
        else:
            words.append(group)
    return words


def _join_punctuation(groups: list[Group]) -> list[Group]:
    """Join opening punctuation to the word after it, and closing punctuation to the word before it."""
    opened: list[Group] = []
    for group in reversed(groups):
        if opened and group.text.startswith(" ") and group.text.strip() in _OPENING:
            opened[-1].text, opened[-1].first = group.text + opened[-1].text, group.first
        else:
            opened.append(group)
    words: list[Group] = []
    for group in reversed(opened):
        if words and not words[-1].text.endswith(" ") and group.text in _CLOSING:
            words[-1].text, words[-1].end = words[-1].text + group.text, group.end
        else:
            words.append(group)
    return words
