"""Messages of the task for speech: the payload and the first result of a window, and the facts of a model.

A window is a part of a file, as long as the model's encoder reads at once. It is one engine request: its prompt is the
tokens with which the transcript begins, and its payload has the features of its sound.
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
    window_cost: int  # places in the KV cache for a window's sound: one for each position, in whole blocks
    languages: dict[str, int]  # the token of each language, by its code; empty: the model knows one language only
    tasks: dict[SpeechTask, int]  # the token of each task; empty for a model of one language
    start: int  # begins every transcript
    previous: int | None  # begins the text before it; None: the model takes none
    end: int
    first_timestamp: int  # the token for 0 s; all from here on are timestamps
    max_tokens: int  # of prompt and transcript of a window together

    @property
    def num_positions(self) -> int:
        """Positions of the encoder in a window."""
        return self.window_frames // self.frames_per_position

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of a prompt, `previous` included."""
        return self.max_tokens // 2 - 1

    @property
    def frames_per_second(self) -> int:
        return self.window_frames // self.window_seconds

    def encode(self) -> bytes:
        """Return the `of_task` of the model's facts."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def read(cls, facts: ModelFacts) -> Self:
        return msgspec.msgpack.decode(facts.of_task, type=cls)


class Window(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The payload of a request."""

    features: bytes  # float32 (frames, mels), at most as many frames as a window has; the rest is silence
    language_at: int | None = None  # where in the prompt the language belongs that the model finds; None: it is there
    align_from: int = 0  # where in the prompt a transcript begins whose tokens get times ...
    align_positions: int = 0  # ... among so many positions of the encoder, those with sound; 0: no times

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def read(cls, payload: bytes) -> Self:
        """`features` is a copy."""
        return msgspec.msgpack.decode(payload, type=cls)


class WindowStart(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What the model found in the window's sound. The payload of the request's first output."""

    language: int | None  # the token of the language that was found; None: the prompt had it
    no_speech_prob: float  # 0..1
    positions: list[int] = []  # of the encoder, at which each token of the transcript begins

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def read(cls, payload: bytes) -> Self:
        return msgspec.msgpack.decode(payload, type=cls)
