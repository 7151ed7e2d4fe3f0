"""Messages of the speech task: the payload and the first result of a window, and the facts of a model.

A window is a part of a file, of the length that the model's encoder reads. Each window is one engine request. The
request's prompt has the tokens with which the transcript begins, and its payload has the features of the sound.
"""

from typing import Literal, Self

import msgspec

from conveyor_engine.wire.request import ModelFacts

SpeechTask = Literal["transcribe", "translate"]


class AudioFacts(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The facts that only speech models have. All tokens are ids."""

    num_mels: int
    window_seconds: int
    window_frames: int
    frames_per_position: int  # frames for each position of the encoder; timestamps are numbers of positions
    window_cost: int  # KV slots for a window's sound: one for each position, rounded up to whole blocks
    languages: dict[str, int]  # the token of each language, by its code; empty: the model has only one language
    tasks: dict[SpeechTask, int]  # the token of each task; empty: the model has only one language
    start: int  # begins every transcript
    previous: int | None  # begins the client's prompt, which is before `start`; None: prompts are not supported
    end: int
    first_timestamp: int  # the token for 0 s; this token and all later ones are timestamps
    max_tokens: int  # limit on the tokens of a window's prompt and transcript together

    @property
    def num_positions(self) -> int:
        """The number of encoder positions in a window."""
        return self.window_frames // self.frames_per_position

    @property
    def max_prompt_tokens(self) -> int:
        """The limit on the tokens of a client's prompt, including the token `previous`."""
        return self.max_tokens // 2 - 1

    @property
    def frames_per_second(self) -> int:
        return self.window_frames // self.window_seconds

    def encode(self) -> bytes:
        """Encode the facts for `ModelFacts.of_task`."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def read(cls, facts: ModelFacts) -> Self:
        return msgspec.msgpack.decode(facts.of_task, type=cls)


class Window(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The payload of a request."""

    features: bytes  # float32 (frames, mels); if there are fewer frames than in a window, the rest is silence
    language_at: int | None = None  # index in the prompt where the model writes the language; None: the prompt has it
    align_from: int = 0  # index in the prompt of the first token that gets a time; used if align_positions > 0
    align_positions: int = 0  # number of encoder positions with sound, from which times are chosen; 0: no times

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def read(cls, payload: bytes) -> Self:
        """Decode the payload of a request. The features are copied."""
        return msgspec.msgpack.decode(payload, type=cls)


class WindowStart(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What the model found in the window's sound. The payload of the request's first output."""

    language: int | None  # the token of the language that the model found; None: the prompt had it
    no_speech_prob: float  # the probability that the window has no speech, 0 to 1
    positions: list[int] = []  # the encoder position at which each token begins; empty if no times were requested

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def read(cls, payload: bytes) -> Self:
        return msgspec.msgpack.decode(payload, type=cls)
