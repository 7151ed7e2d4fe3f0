"""A file's transcript as it grows, and the engine request of its next window. Used by `serving`. Knows no HTTP.

`EngineClient` calls `follow` when a window has ended. So a file always has one window at the engine, and windows of
several files share batches.
"""

import zlib
from typing import Final

from conveyor_engine.tasks.transcribe.preparing import PreparedSpeech
from conveyor_engine.tasks.transcribe.segments import Segment, divide
from conveyor_engine.text.tokenizer import Tokenizer
from conveyor_engine.wire.audio import AudioFacts, Window, WindowResult
from conveyor_engine.wire.request import EngineRequest, RequestOutput
from conveyor_engine.wire.worker import Part

_FLOAT_BYTES: Final = 4


class Told:
    """A segment with its text, and what the model thought of its window."""

    def __init__(self, segment: Segment, text: str, result: WindowResult) -> None:
        self.segment, self.text = segment, text
        self.avg_logprob, self.no_speech_prob = result.avg_logprob, result.no_speech_prob

    @property
    def compression_ratio(self) -> float:
        """Bytes of the text for each compressed one: many where the model repeats itself."""
        data = self.text.encode()
        return len(data) / len(zlib.compress(data))


class Transcript:
    """Of one request."""

    def __init__(self, prepared: PreparedSpeech, facts: AudioFacts, tokenizer: Tokenizer) -> None:
        self._prepared, self._facts, self._tokenizer = prepared, facts, tokenizer
        self._tokens, self._language_at = list(prepared.tokens), prepared.language_at
        self._seek = 0
        self.language = prepared.language  # None until the first window has ended
        self.segments: list[Told] = []
        self.num_windows = self.num_tokens = 0

    @property
    def text(self) -> str:
        """The text so far, with the space before it that many languages have."""
        return "".join(each.text for each in self.segments)

    def build_part(self) -> Part:
        """Return the engine request of the next window."""
        prepared, facts = self._prepared, self._facts
        frame_bytes = _FLOAT_BYTES * facts.num_mels
        first = self._seek * frame_bytes
        window = Window(
            tokens=self._tokens,
            features=prepared.features[first : first + facts.window_frames * frame_bytes],
            language_at=self._language_at,
        )
        request = EngineRequest(
            request_id=f"{prepared.id}-{self.num_windows}",
            party=prepared.id,
            payload=window.encode(),
            payload_cost=facts.window_seconds,
            level=prepared.level,
            deadline=prepared.deadline,
            arrival_time=prepared.arrival_time,
        )
        self.num_windows += 1
        return Part.of([request])

    def follow(self, output: RequestOutput) -> Part | None:
        """Add the window that has ended. Return the request of the next one; None at the end, and after a failure."""
        if output.has_failed or output.payload is None:
            return None
        result = WindowResult.read(output.payload)
        if result.language is not None and self._language_at is not None:
            self._tokens[self._language_at], self._language_at = result.language, None
            codes = {token: code for code, token in self._facts.languages.items()}
            self.language = codes[result.language]
        left = min(self._prepared.num_frames - self._seek, self._facts.window_frames)
        segments, advance = divide(result.tokens, self._seek, left, self._facts)
        self.segments += [Told(each, self._read(each.tokens), result) for each in segments]
        self.num_tokens += len(result.tokens)
        self._seek += advance
        return self.build_part() if self._seek < self._prepared.num_frames else None

    def _read(self, tokens: list[int]) -> str:
        words = [token for token in tokens if token < self._facts.end]
        return self._tokenizer.decode(words, skip_special_tokens=True)
