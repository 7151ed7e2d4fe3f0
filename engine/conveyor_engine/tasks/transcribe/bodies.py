"""The forms of requests for transcripts. The fields are OpenAI's. Pure."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from conveyor_engine.serving.preparing.schemas import ModelFields

Format = Literal["json", "text", "verbose_json", "srt", "vtt"]
_FILE: dict[str, Any] = {"type": "string", "format": "binary"}


class SpeechOptions(ModelFields):
    """The fields of both forms."""

    prompt: Annotated[str, Field(max_length=8192)] | None = None
    """A text before the sound, whose words and style the model prefers. Only the end of a long text is used."""
    response_format: Format | None = "json"
    """`json`, `text`, `verbose_json` (with segments and times), or subtitles as `srt` or `vtt`."""
    temperature: Annotated[float, Field(ge=0, le=1)] | None = 0
    """0: the likeliest token is chosen. Above 0: tokens are drawn at random."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """The same seed draws the same tokens. Not in OpenAI's API."""
    stream: bool | None = False
    """True: server-sent events with the text of each finished segment. Only for `json` and `text`."""

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.stream and self.response_format not in ("json", "text", None):
            raise PydanticCustomError("stream", f"stream is not possible with response_format {self.response_format}")
        return self


class TranscriptionOptions(SpeechOptions):
    """The fields of a transcription."""

    language: Annotated[str, Field(min_length=1, max_length=40)] | None = None
    """The spoken language, as a code such as `en` or as its English name; default: the model detects it."""
    timestamp_granularities: Annotated[
        list[Literal["segment", "word"]] | None, Field(alias="timestamp_granularities[]")
    ] = None
    """`segment`, `word` or both, for `verbose_json`. `word` computes each window twice."""

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        if self.timestamp_granularities and self.response_format != "verbose_json":
            name = "timestamp_granularities"
            raise PydanticCustomError(name, f"{name} is only allowed with response_format verbose_json")
        return self


class TranscriptionForm(TranscriptionOptions):
    """POST /v1/audio/transcriptions with multipart/form-data."""

    file: Annotated[bytes, WithJsonSchema(_FILE)]
    """WAV, FLAC, MP3 or OGG (Vorbis, Opus)."""


class TranslationForm(SpeechOptions):
    """POST /v1/audio/translations with multipart/form-data."""

    file: Annotated[bytes, WithJsonSchema(_FILE)]
    """WAV, FLAC, MP3 or OGG (Vorbis, Opus)."""
