"""Serves POST /v1/audio/transcriptions and /v1/audio/translations."""

import time
from collections.abc import Iterator
from typing import Final

from starlette.requests import Request
from starlette.types import Send

from conveyor_engine.errors import RequestError
from conveyor_engine.serving.http.app_state import app_state, model_facts
from conveyor_engine.serving.http.engine_response import EngineResponse, Opened, prepare_request
from conveyor_engine.serving.http.events import SSE_HEADERS, encode, event
from conveyor_engine.serving.http.failures import failure_body, find_failure
from conveyor_engine.serving.http.task_paths import TaskPath, TaskPaths
from conveyor_engine.serving.http.usage import build_last_words
from conveyor_engine.tasks.transcribe.bodies import TranscriptionForm, TranslationForm
from conveyor_engine.tasks.transcribe.facts import AudioFacts
from conveyor_engine.tasks.transcribe.preparing import PreparedSpeech
from conveyor_engine.tasks.transcribe.serving.answers import (
    DurationUsage,
    Transcription,
    TranscriptTextDelta,
    TranscriptTextDone,
    VerboseTranscription,
    build_verbose,
    count_usage,
    write_srt,
    write_vtt,
)
from conveyor_engine.tasks.transcribe.serving.transcript import Transcript
from conveyor_engine.wire.request import FinishReason, RequestOutput
from conveyor_protocol.uploads import AUDIO_BYTES_MAX
from conveyor_protocol.usage import UsedTokens

_JSON: Final = (b"content-type", b"application/json")
_TEXT: Final = (b"content-type", b"text/plain; charset=utf-8")


class TranscriptResponse(EngineResponse):
    """The transcript of a file, whole or as a stream."""

    def __init__(self, opened: Opened, prepared: PreparedSpeech, transcript: Transcript) -> None:
        super().__init__(opened)
        self._prepared, self._transcript = prepared, transcript
        self._sent = time.monotonic()
        self._has_ended = False

    async def _send_answer(self, send: Send) -> None:
        self._held.grow(len(self._prepared.features))
        self._state.metrics.observe_prompt(len(self._prepared.tokens))
        if self._prepared.stream:
            await self._send_stream(send)
            return
        async for outputs in self._generation.batches():
            for output in outputs:
                self._add(output)
        self._end(FinishReason.STOP)
        header = _JSON if self._prepared.response_format in ("json", "verbose_json") else _TEXT
        await self._send_body(self._write(), [header], send)

    def _write(self) -> Iterator[bytes]:
        transcript, seconds = self._transcript, self._prepared.seconds
        match self._prepared.response_format:
            case "json":
                yield encode(Transcription(transcript.text.strip(), self._count_usage()))
            case "verbose_json":
                wants_words = self._prepared.wants_words
                yield encode(
                    build_verbose(
                        transcript, self._prepared.task, self._count_usage(), seconds, wants_words=wants_words
                    )
                )
            case "text":
                yield f"{transcript.text.strip()}\n".encode()
            case "srt":
                yield from write_srt(transcript.segments)
            case "vtt":
                yield from write_vtt(transcript.segments)

    def _count_usage(self) -> DurationUsage:
        return count_usage(self._prepared.seconds, self._find_receipt())

    async def _send_stream(self, send: Send) -> None:
        """Send events. The status is sent with the first text, so a failure before that has an error status."""
        num_sent = 0
        try:
            async for outputs in self._generation.batches():
                for output in outputs:
                    self._add(output)
                text = self._transcript.text.lstrip()
                if len(text) > num_sent:
                    await self._send_event(TranscriptTextDelta(text[num_sent:]), send)
                    num_sent = len(text)
            self._end(FinishReason.STOP)
            done = TranscriptTextDone(self._transcript.text.strip(), self._count_usage())
            await self._send_event(done, send)
            last = b""
        except RequestError as error:
            if not self._started:
                raise
            self._note_failure(error)
            last = event(failure_body(error))
        await send({"type": "http.response.body", "body": last + build_last_words(self._report)})

    async def _send_event(self, message: TranscriptTextDelta | TranscriptTextDone, send: Send) -> None:
        if not self._started:
            await self._start(list(SSE_HEADERS), send)
        name = "transcript.text.delta" if isinstance(message, TranscriptTextDelta) else "transcript.text.done"
        await send({"type": "http.response.body", "body": event(encode(message), name), "more_body": True})

    def _add(self, output: RequestOutput) -> None:
        """Record the times of a window that has ended. Raises DeadlineExceeded or GenerationFailed."""
        if (failure := find_failure(output)) is not None:
            assert output.finish_reason is not None
            self._end(output.finish_reason)
            raise failure
        if output.finish_reason is None:
            return
        queued, computed = output.scheduled_time - self._sent, time.monotonic() - output.scheduled_time
        self._state.metrics.observe_stages(max(0.0, queued), computed, 0.0, output.num_preemptions)
        self._sent = time.monotonic()

    def _count_used(self) -> UsedTokens:
        done = self._transcript
        return UsedTokens(len(self._prepared.tokens) if done.segments else 0, 0, done.num_tokens)

    def _leave(self) -> None:
        self._end(FinishReason.ABORT)

    def _end(self, reason: FinishReason) -> None:
        if not self._has_ended:
            self._has_ended = True
            seconds = time.monotonic() - self._prepared.arrival_time
            self._state.metrics.observe_end(reason.value, self._transcript.num_tokens, seconds, 0.0)


async def _open(request: Request, kind: str) -> TranscriptResponse:
    async with prepare_request(request, kind) as arriving:
        state, prepared = arriving.state, arriving.prepared
        assert isinstance(prepared, PreparedSpeech)
        transcript = Transcript(prepared, AudioFacts.read(model_facts(app_state(request))), state.model.tokenizer)
        seconds_left = arriving.deadline - time.monotonic()
        generation = state.engine.open_generation(
            [transcript.build_part()], seconds_left, arriving.place_condition, transcript.follow
        )
    return TranscriptResponse(Opened(state, prepared, generation, arriving.arrived, seconds_left), prepared, transcript)


async def transcribe(request: Request) -> TranscriptResponse:
    """Answer with the transcript of a file. Its windows share batches with those of other files."""
    return await _open(request, "transcription")


async def translate(request: Request) -> TranscriptResponse:
    """Answer with the transcript of a file, translated into English by the model."""
    return await _open(request, "translation")


_ANSWERS: Final = (Transcription, VerboseTranscription)
_EVENTS: Final = (TranscriptTextDelta, TranscriptTextDone)
TASK: Final = TaskPaths(
    (
        TaskPath(
            "/v1/audio/transcriptions", transcribe, "Writes down what is said in an audio file.", None, _ANSWERS,
            form=TranscriptionForm, events=_EVENTS, is_text_too=True,
        ),
        TaskPath(
            "/v1/audio/translations", translate, "Writes down in English what is said in an audio file.", None,
            _ANSWERS, form=TranslationForm, events=_EVENTS, is_text_too=True,
        ),
    ),
    inputs_bytes_max=AUDIO_BYTES_MAX,
)  # fmt: skip
