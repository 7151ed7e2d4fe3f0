"""Collects a file's transcript, and builds the engine request for its next window. Used by `serving`.

`EngineClient` calls `follow` with each output of a window. After the last one, `follow` returns the next request. So a
file always has one window at the engine. Windows of several files share steps.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from conveyor_engine.tasks.transcribe.facts import AudioFacts, Window, WindowStart
from conveyor_engine.tasks.transcribe.preparing import PreparedSpeech
from conveyor_engine.tasks.transcribe.serving.segments import Segment, divide, list_closed
from conveyor_engine.tasks.transcribe.serving.words import group_words
from conveyor_engine.text.tokenizer import Tokenizer
from conveyor_engine.wire.request import EngineRequest, RequestOutput, SamplingParams
from conveyor_engine.wire.worker import Part

_FLOAT_BYTES: Final = 4


class WindowOutputs:
    """The outputs of the engine for a window so far."""

    def __init__(self) -> None:
        self.tokens: list[int] = []  # includes the end token, if there is one
        self.start: WindowStart | None = None
        self._sum_logprobs = 0.0

    def add(self, output: RequestOutput) -> None:
        if output.payload is not None:
            self.start = WindowStart.read(output.payload)
        self.tokens += output.new_token_ids
        self._sum_logprobs += sum(each.logprob or 0.0 for each in output.logprobs or ())

    @property
    def avg_logprob(self) -> float:
        """The mean log probability of the tokens, the end token included."""
        return self._sum_logprobs / len(self.tokens)


@dataclass(frozen=True, slots=True)
class Word:
    """A word with its times, in seconds of the file."""

    text: str
    start: float
    end: float


class TextSegment:
    """A segment with its text, and the probabilities of its window."""

    def __init__(self, segment: Segment, text: str, outputs: WindowOutputs, temperature: float) -> None:
        self.segment, self.text, self.temperature = segment, text, temperature
        self.avg_logprob = outputs.avg_logprob
        self.no_speech_prob = outputs.start.no_speech_prob if outputs.start is not None else 0.0

    @property
    def compression_ratio(self) -> float:
        """The length of the text divided by its compressed length. It is high if the model repeats itself."""
        data = self.text.encode()
        return len(data) / len(zlib.compress(data))


class Transcript:
    """The transcript of one request."""

    def __init__(self, prepared: PreparedSpeech, facts: AudioFacts, tokenizer: Tokenizer) -> None:
        self._prepared, self._facts, self._tokenizer = prepared, facts, tokenizer
        self._tokens, self._language_at = list(prepared.tokens), prepared.language_at
        self._seek = 0
        self._note_answer = WindowOutputs()
        self._aligns = False  # whether the current request at the engine finds the times of words
        self._closed_text = ""  # text of the closed segments of the running window
        self.language = prepared.language  # the code; None until the model has detected it in the first window
        self.segments: list[TextSegment] = []
        self.words: list[Word] = []  # empty if the client does not request words
        self.num_windows = self.num_tokens = 0

    @property
    def text(self) -> str:
        """The text of all closed segments so far. In many languages it begins with a space."""
        return "".join(each.text for each in self.segments) + self._closed_text

    @property
    def _num_frames_left(self) -> int:
        """The number of frames from the window's beginning to its end, or to the end of the file."""
        return min(self._prepared.num_frames - self._seek, self._facts.window_frames)

    def build_part(self) -> Part:
        """Return the engine request of the next window."""
        prepared = self._prepared
        seed = None if prepared.seed is None else (prepared.seed + self.num_windows) % 2**63
        max_tokens = self._facts.max_tokens - len(self._tokens)
        params = SamplingParams(max_tokens=max_tokens, temperature=prepared.temperature, seed=seed)
        window = Window(features=self._cut_features(), language_at=self._language_at)
        self._note_answer = WindowOutputs()
        self._aligns = False
        self.num_windows += 1
        return self._build(f"{prepared.id}-{self.num_windows - 1}", self._tokens, window, params)

    def _build_alignment(self) -> Part:
        """Return the engine request that finds the times of the window's tokens. It generates one unused token."""
        window = Window(
            features=self._cut_features(),
            align_from=len(self._tokens),
            align_positions=self._num_frames_left // self._facts.frames_per_position,
        )
        tokens = [*self._tokens, *self._note_answer.tokens[:-1]]
        params = SamplingParams(max_tokens=1, temperature=0.0)
        self._aligns = True
        return self._build(f"{self._prepared.id}-{self.num_windows - 1}-words", tokens, window, params)

    def _cut_features(self) -> bytes:
        frame_bytes = _FLOAT_BYTES * self._facts.num_mels
        first = self._seek * frame_bytes
        return self._prepared.features[first : first + self._facts.window_frames * frame_bytes]

    def _build(self, request_id: str, tokens: list[int], window: Window, params: SamplingParams) -> Part:
        prepared = self._prepared
        request = EngineRequest(
            request_id=request_id,
            party=prepared.id,
            prompt_token_ids=tokens,
            payload=window.encode(),
            payload_cost=self._facts.window_cost,
            params=params,
            level=prepared.level,
            deadline=prepared.deadline,
            arrival_time=prepared.arrival_time,
        )
        return Part.of([request])

    def follow(self, output: RequestOutput) -> Part | None:
        """Add an output of the window. After the window's last output, return the next engine request, if there is one.

        If the client requests words, the next request finds the times of this window's tokens, and the one after it is
        for the next window. Otherwise the next request is for the next window.
        """
        if output.has_failed:
            return None
        if self._aligns:
            self._add_window([] if output.payload is None else WindowStart.read(output.payload).positions)
            return self.build_part() if self._seek < self._prepared.num_frames else None
        self._note_answer.add(output)
        if output.finish_reason is None:
            if any(token >= self._facts.first_timestamp for token in output.new_token_ids):
                closed = list_closed(self._note_answer.tokens, self._facts.first_timestamp)
                self._closed_text = "".join(map(self._read, closed))
            return None
        self._find_language()
        if self._prepared.wants_words and len(self._note_answer.tokens) > 1:
            return self._build_alignment()
        self._add_window([])
        return self.build_part() if self._seek < self._prepared.num_frames else None

    def _find_language(self) -> None:
        """If the model has detected the language, use it in the next windows."""
        outputs = self._note_answer
        if outputs.start is not None and outputs.start.language is not None and self._language_at is not None:
            self._tokens[self._language_at], self._language_at = outputs.start.language, None
            codes = {token: code for code, token in self._facts.languages.items()}
            self.language = codes[outputs.start.language]

    def _add_window(self, positions: list[int]) -> None:
        """Add the segments of the window, which has ended.

        positions: the encoder position at which each token begins; empty if unknown.
        """
        outputs, facts = self._note_answer, self._facts
        tokens = outputs.tokens[:-1] if outputs.tokens[-1] == facts.end else outputs.tokens
        segments, advance = divide(tokens, self._seek, self._num_frames_left, facts)
        temperature = self._prepared.temperature
        self.segments += [TextSegment(each, self._read(each.tokens), outputs, temperature) for each in segments]
        if positions:
            self.words += [word for each in segments for word in self._list_words(each, positions)]
        self._closed_text = ""
        self.num_tokens += len(tokens)
        # `advance` is 0 if the last closed segment ends where the window begins. The window would then repeat forever.
        self._seek += advance or self._num_frames_left

    def _list_words(self, segment: Segment, positions: list[int]) -> Iterator[Word]:
        """Yield the segment's words. A word ends where the token after it begins."""
        facts = self._facts
        begin, seconds = self._seek / facts.frames_per_second, facts.frames_per_position / facts.frames_per_second
        places = [segment.first + place for place, token in enumerate(segment.tokens) if token < facts.end]
        tokens = [token for token in segment.tokens if token < facts.end]
        for group in group_words(tokens, self._read, self.language):
            first, after = places[group.first], places[group.end - 1] + 1
            start, end = (begin + positions[min(place, len(positions) - 1)] * seconds for place in (first, after))
            yield Word(group.text.strip(), start, end)

    def _read(self, tokens: list[int]) -> str:
        words = [token for token in tokens if token < self._facts.end]
        return self._tokenizer.decode(words, skip_special_tokens=True)
