"""A file's transcript as it grows, and the engine request of its next window. Used by `serving`. Knows no HTTP.

`EngineClient` calls `follow` with each output of a window. So a file always has one window at the engine, and windows
of several files share steps.
"""

import zlib
from typing import Final

from conveyor_engine.tasks.transcribe.preparing import PreparedSpeech
from conveyor_engine.tasks.transcribe.segments import Segment, divide, list_closed
from conveyor_engine.text.tokenizer import Tokenizer
from conveyor_engine.wire.audio import AudioFacts, Window, WindowStart
from conveyor_engine.wire.request import EngineRequest, RequestOutput, SamplingParams
from conveyor_engine.wire.worker import Part

_FLOAT_BYTES: Final = 4


class Heard:
    """What the engine has said of a window so far."""

    def __init__(self) -> None:
        self.tokens: list[int] = []  # with the end, once it has come
        self.start: WindowStart | None = None
        self._sum_logprobs = 0.0

    def add(self, output: RequestOutput) -> None:
        if output.payload is not None:
            self.start = WindowStart.read(output.payload)
        self.tokens += output.new_token_ids
        self._sum_logprobs += sum(each.logprob or 0.0 for each in output.logprobs or ())

    @property
    def avg_logprob(self) -> float:
        """Of the tokens and the end."""
        return self._sum_logprobs / len(self.tokens)


class Told:
    """A segment with its text, and what the model thought of its window."""

    def __init__(self, segment: Segment, text: str, heard: Heard, temperature: float) -> None:
        self.segment, self.text, self.temperature = segment, text, temperature
        self.avg_logprob = heard.avg_logprob
        self.no_speech_prob = heard.start.no_speech_prob if heard.start is not None else 0.0

    @property
    def compression_ratio(self) -> float:
        """Bytes of the text for each compressed one: many if the model repeats itself."""
        data = self.text.encode()
        return len(data) / len(zlib.compress(data))


class Transcript:
    """The transcript of one request."""

    def __init__(self, prepared: PreparedSpeech, facts: AudioFacts, tokenizer: Tokenizer) -> None:
        self._prepared, self._facts, self._tokenizer = prepared, facts, tokenizer
        self._tokens, self._language_at = list(prepared.tokens), prepared.language_at
        self._seek = 0
        self._heard = Heard()
        self._closed_text = ""  # of the segments of the running window that are certain
        self.language = prepared.language  # None until the first window has begun
        self.segments: list[Told] = []
        self.num_windows = self.num_tokens = 0

    @property
    def text(self) -> str:
        """The text that is certain so far, with the space before it that many languages have."""
        return "".join(each.text for each in self.segments) + self._closed_text

    def build_part(self) -> Part:
        """Return the engine request of the next window."""
        prepared, facts = self._prepared, self._facts
        frame_bytes = _FLOAT_BYTES * facts.num_mels
        first = self._seek * frame_bytes
        features = prepared.features[first : first + facts.window_frames * frame_bytes]
        seed = None if prepared.seed is None else (prepared.seed + self.num_windows) % 2**63
        request = EngineRequest(
            request_id=f"{prepared.id}-{self.num_windows}",
            party=prepared.id,
            prompt_token_ids=self._tokens,
            payload=Window(features=features, language_at=self._language_at).encode(),
            payload_cost=facts.window_cost,
            params=SamplingParams(
                max_tokens=facts.max_tokens - len(self._tokens), temperature=prepared.temperature, seed=seed
            ),
            level=prepared.level,
            deadline=prepared.deadline,
            arrival_time=prepared.arrival_time,
        )
        self._heard = Heard()
        self.num_windows += 1
        return Part.of([request])

    def follow(self, output: RequestOutput) -> Part | None:
        """Add an output of the window. After its last one, return the request of the next window, if there is one."""
        if output.has_failed:
            return None
        self._heard.add(output)
        if output.finish_reason is None:
            if any(token >= self._facts.first_timestamp for token in output.new_token_ids):
                closed = list_closed(self._heard.tokens, self._facts.first_timestamp)
                self._closed_text = "".join(map(self._read, closed))
            return None
        self._add_window()
        return self.build_part() if self._seek < self._prepared.num_frames else None

    def _add_window(self) -> None:
        """Add the segments of the window, which has ended."""
        heard, facts = self._heard, self._facts
        if heard.start is not None and heard.start.language is not None and self._language_at is not None:
            self._tokens[self._language_at], self._language_at = heard.start.language, None
            codes = {token: code for code, token in facts.languages.items()}
            self.language = codes[heard.start.language]
        tokens = heard.tokens[:-1] if heard.tokens[-1] == facts.end else heard.tokens
        left = min(self._prepared.num_frames - self._seek, facts.window_frames)
        segments, advance = divide(tokens, self._seek, left, facts)
        temperature = self._prepared.temperature
        self.segments += [Told(each, self._read(each.tokens), heard, temperature) for each in segments]
        self._closed_text = ""
        self.num_tokens += len(tokens)
        self._seek += advance

    def _read(self, tokens: list[int]) -> str:
        words = [token for token in tokens if token < self._facts.end]
        return self._tokenizer.decode(words, skip_special_tokens=True)
