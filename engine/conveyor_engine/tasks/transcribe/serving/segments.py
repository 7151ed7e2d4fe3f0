"""Divides a window's tokens into segments with times, as transformers' sequential algorithm does. Pure.

A segment is closed if another segment begins after it. If a window has closed segments and ends within a later one,
the next window begins where the last closed segment ended, so that the end of a window cuts no word. Otherwise the next
window begins where this window ends.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from conveyor_engine.tasks.transcribe.facts import AudioFacts


class Segment(NamedTuple):
    """A part of a transcript."""

    seek: int  # the frame at which its window begins
    start: float  # seconds of the file
    end: float  # seconds of the file
    tokens: list[int]  # timestamps included
    first: int  # index of its first token in the window


def list_closed(tokens: Sequence[int], first_timestamp: int) -> list[list[int]]:
    """Return the tokens of each closed segment: one after which another segment has begun.

    For the whole window, `divide` returns the same segments, and perhaps more.
    """
    ends = _find_ends([token >= first_timestamp for token in tokens])
    return [list(tokens[start:end]) for start, end in pairwise([0, *ends])]


def _find_ends(is_time: Sequence[bool]) -> list[int]:
    """Return the index after each segment's last token. Segments end between two consecutive timestamps."""
    return [index + 1 for index in range(len(is_time) - 1) if is_time[index] and is_time[index + 1]]


def divide(tokens: Sequence[int], seek: int, num_frames: int, facts: AudioFacts) -> tuple[list[Segment], int]:
    """Return the segments of the window at frame `seek`, and how many frames later the next window begins.

    num_frames: the number of frames from `seek` to the end of the window or of the file.
    """
    first = facts.first_timestamp
    begin, position = seek / facts.frames_per_second, facts.frames_per_position / facts.frames_per_second
    is_time = [token >= first for token in tokens]
    ends = _find_ends(is_time)
    if not ends:
        offsets = [token - first for token in tokens if token >= first]
        last = offsets[-1] if offsets and offsets[-1] else num_frames // facts.frames_per_position
        return [Segment(seek, begin, begin + last * position, list(tokens), 0)], num_frames
    ends_with_one = is_time[-2:] == [False, True]
    if ends_with_one:  # no speech follows the last timestamp
        ends.append(len(tokens))
    segments, start = [], 0
    for end in ends:
        own = list(tokens[start:end])
        times = begin + (own[0] - first) * position, begin + (own[-1] - first) * position
        segments.append(Segment(seek, *times, own, start))
        start = end
    if ends_with_one:
        return segments, num_frames
    # As in transformers, the last segment also gets the timestamp with which an unfinished segment begins.
    segments[-1].tokens.append(tokens[ends[-1]])
    return segments, (tokens[ends[-1] - 1] - first) * facts.frames_per_position
