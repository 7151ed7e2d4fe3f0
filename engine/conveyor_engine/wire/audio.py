"""Messages of the task for speech: the payload and the result of a window, and the facts of a model.

A window is a part of a file, as long as the model's encoder reads at once. It is one engine request. The payload has
its features: float32 numbers (frames, mels), at most as many frames as a window has.
"""

from typing import Literal, Self

import msgspec

from conveyor_engine.wire.request import ModelFacts

SpeechTask = Literal["transcribe", "translate"]


class AudioFacts(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The facts that only models of speech have. All tokens are ids."""

    num_mels: int
    window_seconds: int
    window_frames: int
    frames_per_position: int  # of the encoder; a timestamp counts positions
    languages: dict[str, int]  # the token of each language, by its code; empty: the model knows one language only
    tasks: dict[SpeechTask, int]  # the token of each task; empty for a model of one language
    start: int  # begins every transcript
    previous: int | None  # begins the text before it; None: the model takes none
    end: int
    first_timestamp: int  # the token for 0 s; all from here on are timestamps
    max_tokens: int  # of prompt and transcript of a window together

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of a prompt, `previous` included."""
        return self.max_tokens // 2 - 1

    @property
    def frames_per_second(self) -> int:
        return self.window_frames // self.window_seconds

    def encode(self) -> bytes:
        """The `of_task` of the model's facts."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def read(cls, facts: ModelFacts) -> Self:
        return msgspec.msgpack.decode(facts.of_task, type=cls)


class Window(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The payload of a request."""

    tokens: list[int]  # that the decoder begins with: an earlier text, `start`, the language and the task
    features: bytes
    language_at: int | None = None  # where in `tokens` the language belongs that the model finds; None: it is there
    max_new_tokens: int | None = None  # None: as many as the model has room for
    never_ends: bool = False  # for warm-up and measurements: the transcript has `max_new_tokens` whatever they are

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def read(cls, payload: bytes) -> Self:
        """`features` is a copy."""
        return msgspec.msgpack.decode(payload, type=cls)


class WindowResult(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The payload of a result."""

    tokens: list[int]  # without those of the request, and without the end
    language: int | None  # the token of the language that was found; None: the request had it
    avg_logprob: float  # of the tokens and the end
    no_speech_prob: float  # 0..1

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def read(cls, payload: bytes) -> Self:
        return msgspec.msgpack.decode(payload, type=cls)
