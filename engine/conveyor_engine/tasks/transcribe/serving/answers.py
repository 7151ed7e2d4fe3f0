"""Builds the answers to requests for transcripts: JSON, text, subtitles, events. The fields are OpenAI's. Pure."""

import math
from collections.abc import Iterator

import msgspec
from msgspec import UNSET, UnsetType

from conveyor_engine.serving.http.receipts import Receipt
from conveyor_engine.tasks.transcribe.facts import SpeechTask
from conveyor_engine.tasks.transcribe.languages import NAMES
from conveyor_engine.tasks.transcribe.serving.transcript import TextSegment, Transcript


class DurationUsage(msgspec.Struct, tag_field="type", tag="duration"):
    """The length of the sound, rounded up. OpenAI bills transcripts by it."""

    seconds: int
    receipt: Receipt | UnsetType = UNSET


class Transcription(msgspec.Struct):
    """The answer for the format `json`."""

    text: str
    usage: DurationUsage


class TranscriptionSegment(msgspec.Struct):
    """A segment of `verbose_json`."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class TranscriptionWord(msgspec.Struct):
    """A word of `verbose_json`."""

    word: str
    start: float
    end: float


class VerboseTranscription(msgspec.Struct, omit_defaults=True):
    """The answer for the format `verbose_json`. `duration` and all times are in seconds."""

    task: SpeechTask
    language: str
    duration: float
    text: str
    segments: list[TranscriptionSegment]
    usage: DurationUsage
    words: list[TranscriptionWord] | None = None  # set if timestamp_granularities has `word`


class TranscriptTextDelta(msgspec.Struct, tag_field="type", tag="transcript.text.delta"):
    """An event with new text, which no later event changes."""

    delta: str


class TranscriptTextDone(msgspec.Struct, tag_field="type", tag="transcript.text.done"):
    """The last event, with the whole text."""

    text: str
    usage: DurationUsage


def count_usage(seconds: float, receipt: Receipt | UnsetType = UNSET) -> DurationUsage:
    """Return the usage of a file of this length."""
    return DurationUsage(math.ceil(seconds), receipt)


def build_verbose(
    transcript: Transcript, task: SpeechTask, usage: DurationUsage, seconds: float, *, wants_words: bool = False
) -> VerboseTranscription:
    """Build the whole answer. A language without a known name is given by its code."""
    language = transcript.language or ""
    segments = [_build_segment(number, each) for number, each in enumerate(transcript.segments)]
    name = NAMES.get(language, language)
    words = [TranscriptionWord(each.text, round(each.start, 3), round(each.end, 3)) for each in transcript.words]
    text = transcript.text.strip()
    return VerboseTranscription(task, name, seconds, text, segments, usage, words if wants_words else None)


def _build_segment(number: int, each: TextSegment) -> TranscriptionSegment:
    segment = each.segment
    return TranscriptionSegment(
        number, segment.seek, round(segment.start, 3), round(segment.end, 3), each.text, segment.tokens,
        each.temperature, each.avg_logprob, each.compression_ratio, each.no_speech_prob,
    )  # fmt: skip


def write_srt(segments: list[TextSegment]) -> Iterator[bytes]:
    """Yield the segments as SubRip subtitles."""
    for number, each in enumerate(segments, 1):
        times = f"{_write_time(each.segment.start, ',')} --> {_write_time(each.segment.end, ',')}"
        yield f"{number}\n{times}\n{_write_line(each)}\n\n".encode()


def write_vtt(segments: list[TextSegment]) -> Iterator[bytes]:
    """Yield the segments as WebVTT subtitles."""
    yield b"WEBVTT\n\n"
    for each in segments:
        times = f"{_write_time(each.segment.start, '.')} --> {_write_time(each.segment.end, '.')}"
        yield f"{times}\n{_write_line(each)}\n\n".encode()


def _write_line(each: TextSegment) -> str:
    """Return the text on one line. `-->` becomes `->`, because players read a line with `-->` as times."""
    return " ".join(each.text.split()).replace("-->", "->")


def _write_time(seconds: float, point: str) -> str:
    """Return the time as hours, minutes, seconds and milliseconds, such as `00:01:02,500`. point: `,` or `.`."""
    thousandths = round(seconds * 1000)
    whole, thousandths = divmod(thousandths, 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{point}{thousandths:03}"
