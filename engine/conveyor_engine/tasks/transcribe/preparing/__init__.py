"""Validates forms with an audio file and computes its features. Runs in worker processes.

Where a window begins depends on the transcript of the window before it. So the API process builds the engine request
for a window when the previous one has ended (`transcript`).
"""

import uuid
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.forms import is_form, parse_form
from conveyor_engine.serving.preparing.jobs import BodyKind, Lane, ServedModel
from conveyor_engine.tasks.transcribe.bodies import Format, SpeechOptions, TranscriptionOptions
from conveyor_engine.tasks.transcribe.facts import AudioFacts, SpeechTask
from conveyor_engine.tasks.transcribe.languages import find_code
from conveyor_engine.text.tokenizer import Truncation
from conveyor_engine.wire.worker import Job, Part

# Limit per job. The features of SECONDS_MAX with 128 bands take 77 MB, and a job has a few copies of them.
_MEMORY_BYTES: Final = 640 * 2**20
_CPU_SECONDS: Final = 10.0  # limit per job, in addition to the time for its bytes; SECONDS_MAX of sound take 2 s


class PreparedSpeech(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A valid request: the features of the whole file, and how its transcript begins."""

    id: str
    parts: list[Part] = []
    arrival_time: float
    deadline: float
    level: int
    ignored_fields: int
    task: SpeechTask
    language: str | None  # the code; None: the model detects the language
    tokens: list[int]  # the tokens with which each window's transcript begins
    # Index in `tokens` where the model writes the language. None: the language is known, or the model has no languages.
    language_at: int | None
    features: bytes  # float32 (frames, num_mels), at least as many frames as a window has
    num_frames: int  # number of frames with sound; the rest is silence
    seconds: float
    temperature: float
    seed: int | None  # seed of the first window; it grows by one with each window
    wants_words: bool
    response_format: Format
    stream: bool


def prepare_transcription(model: ServedModel, job: Job) -> PreparedSpeech:
    """Prepare a request for a transcript in the spoken language. Raises InvalidRequest or UnknownModel."""
    return _prepare(model, job, TranscriptionOptions, "transcribe")


def prepare_translation(model: ServedModel, job: Job) -> PreparedSpeech:
    """Prepare a request for a transcript in English. Raises InvalidRequest or UnknownModel."""
    return _prepare(model, job, SpeechOptions, "translate")


def _prepare(model: ServedModel, job: Job, schema: type[SpeechOptions], task: SpeechTask) -> PreparedSpeech:
    from conveyor_engine.tasks.transcribe.preparing.decoding import (
        decode_audio,  # imports numpy, which the API process lacks
    )

    if not is_form(job.content_type):
        raise InvalidRequest("send the file as multipart/form-data, in a part named file", param="file")
    fields, (data,) = parse_form(model, schema, job, "file", 1)
    facts = AudioFacts.read(job.facts)
    requested = fields.language if isinstance(fields, TranscriptionOptions) else None
    granularities = fields.timestamp_granularities or () if isinstance(fields, TranscriptionOptions) else ()
    language = _check_language(requested, facts)
    if task == "translate" and task not in facts.tasks:
        raise InvalidRequest("this model cannot translate: it has only one language", param="model")
    tokens = _read_prompt(model, fields.prompt, facts)
    tokens.append(facts.start)
    language_at = None
    if facts.languages:
        language_at = len(tokens) if language is None else None
        tokens += [facts.start if language is None else facts.languages[language], facts.tasks[task]]
    features, num_frames = model.reader.extract(decode_audio(data, model.reader.rate, "file"))
    return PreparedSpeech(
        id=f"speech-{uuid.uuid4().hex}",
        arrival_time=job.arrival_time,
        deadline=job.deadline,
        level=job.find_level(fields.priority),
        ignored_fields=fields.ignored,
        task=task,
        language=language,
        tokens=tokens,
        language_at=language_at,
        features=features.tobytes(),
        num_frames=num_frames,
        seconds=num_frames / facts.frames_per_second,
        temperature=fields.temperature or 0.0,
        seed=fields.seed,
        wants_words="word" in granularities,
        response_format=fields.response_format or "json",
        stream=bool(fields.stream),
    )


def _check_language(requested: str | None, facts: AudioFacts) -> str | None:
    """Return the code of the language; None if the model must detect it. Raises InvalidRequest."""
    if not facts.languages:
        if requested is not None and find_code(requested) != "en":
            raise InvalidRequest(f"language is {requested!r}, but this model supports only English", param="language")
        return "en"
    if requested is None:
        return None
    if (code := find_code(requested)) not in facts.languages:
        known = ", ".join(sorted(facts.languages))
        raise InvalidRequest(f"language is {requested!r}; this model supports {known}", param="language")
    return code


def _read_prompt(model: ServedModel, prompt: str | None, facts: AudioFacts) -> list[int]:
    """Return the tokens of the client's prompt, after the token `previous`. Only the end of a long prompt is used.

    Returns an empty list without a prompt. Raises InvalidRequest.
    """
    if not (text := (prompt or "").strip()):
        return []
    if facts.previous is None:
        raise InvalidRequest("this model does not support prompts", param="prompt")
    most = Truncation(facts.max_prompt_tokens - 1, "left")
    tokens = model.tokenizer.encode(f" {text}", most.max_tokens, add_special_tokens=False, truncation=most)
    if any(token >= facts.end for token in tokens):
        raise InvalidRequest("prompt contains special tokens of the model; send plain text", param="prompt")
    return [facts.previous, *tokens]


def _build_kind(prepare: Callable[[ServedModel, Job], PreparedSpeech]) -> BodyKind:
    return BodyKind(
        prepare,
        PreparedSpeech,
        lane=Lane.FILES,
        memory_bytes=_MEMORY_BYTES,
        cpu_seconds=_CPU_SECONDS,
        reading="decoded",
        advice="send a shorter file",
    )


TASK: Final[Mapping[str, BodyKind]] = {
    "transcription": _build_kind(prepare_transcription),
    "translation": _build_kind(prepare_translation),
}
