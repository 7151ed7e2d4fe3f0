"""/v1/audio/transcriptions and /v1/audio/translations on a real server, with OpenAI's client: docs/audio.md."""

import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soxr
from jsonschema import Draft202012Validator
from tests.engine.processes import EngineServer, error_of
from tests.engine.receipts import ASKED, check_receipt, check_sum
from tests.engine.speech_models import RATE, draw_sound, encode, save_speech_model
from tests.engine.tasks.transcribe.test_transcripts import generate
from tests.openapi import find_event_schema

PATH = "/v1/audio/transcriptions"
SOUND = np.frombuffer((draw_sound(1, 13.0) * 32767).astype("<i2").tobytes(), "<i2")  # as 16 bits keep it
WAV = encode(SOUND)
MANY = [encode(draw_sound(number, 4.0 + number)) for number in range(6)]


class Served:
    """A server of a tiny model."""

    def __init__(self, folder: Path) -> None:
        self.directory = folder / "tiny"
        self.model = save_speech_model(self.directory)
        self.server = EngineServer(folder / "server", self.directory, max_num_seqs=4)
        self.server.wait_ready()
        self.client = openai.OpenAI(base_url=f"{self.server.url}/v1", api_key="none", max_retries=0)

    def post(self, data: bytes, path: str = PATH, status: int = 200, **fields: Any) -> httpx.Response:
        answer = self.server.client.post(self.server.url + path, data=fields, files={"file": ("x.wav", data)})
        assert answer.status_code == status, answer.text
        return answer


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("audio"))
    with made.server:
        yield made


@pytest.fixture(scope="module")
def document(served: Served) -> Any:
    return served.server.get("/openapi.json").json()


def test_segments_are_those_of_transformers(served: Served) -> None:
    transcript = served.client.audio.transcriptions.create(
        model="tiny", file=("x.wav", WAV), response_format="verbose_json", timestamp_granularities=["segment"]
    )
    expected = generate(served.model, served.directory, SOUND.astype(np.float32) / 32768)
    assert [(each.start, each.end, each.tokens) for each in transcript.segments or ()] == expected
    assert (transcript.duration, transcript.language) == (13.0, transcript.language)
    assert transcript.language in ("english", "german")
    assert transcript.text == "".join(each.text for each in transcript.segments or ()).strip()
    assert all(each.avg_logprob < 0 <= each.no_speech_prob <= 1 for each in transcript.segments or ())


def test_another_rate_is_resampled(served: Served) -> None:
    fine = draw_sound(2, 8.0, 44_100)
    transcript = served.post(
        encode(fine, rate=44_100, subtype="FLOAT"), response_format="verbose_json", language="de"
    ).json()
    sound = soxr.resample(fine, 44_100, RATE, quality="HQ")
    expected = generate(served.model, served.directory, sound, language="de")
    assert [each["tokens"] for each in transcript["segments"]][:2] == [tokens for _, _, tokens in expected][:2]


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # of the client: OpenAI has no newer translations
def test_translations_have_their_own_task(served: Served) -> None:
    transcript = served.client.audio.translations.create(
        model="tiny", file=("x.wav", WAV), response_format="verbose_json"
    )
    assert transcript.task == "translate"  # type: ignore[attr-defined]
    assert transcript.text != served.client.audio.transcriptions.create(model="tiny", file=("x.wav", WAV)).text


def test_words_have_times(served: Served) -> None:
    transcript = served.client.audio.transcriptions.create(
        model="tiny", file=("x.wav", WAV), response_format="verbose_json", timestamp_granularities=["word", "segment"]
    )
    words = transcript.words or []
    assert "".join(each.word for each in words) == "".join(transcript.text.split())
    assert all(0 <= each.start <= each.end <= transcript.duration + 0.02 for each in words)
    plain = served.post(WAV, response_format="verbose_json").json()
    assert "words" not in plain
    assert [each["tokens"] for each in plain["segments"]] == [each.tokens for each in transcript.segments or ()]


def test_a_seed_draws_the_same_tokens_again(served: Served) -> None:
    fields = {"response_format": "verbose_json", "temperature": "0.8"}
    one, again, other = (served.post(WAV, **fields, seed=seed).json() for seed in ("1", "1", "2"))
    assert one == again != other
    assert {segment["temperature"] for segment in one["segments"]} == {0.8}


def test_text_and_subtitles_have_the_words_of_the_segments(served: Served) -> None:
    segments = served.post(WAV, response_format="verbose_json").json()["segments"]
    text = served.post(WAV, response_format="text")
    assert text.headers["content-type"] == "text/plain; charset=utf-8"
    assert text.text == "".join(each["text"] for each in segments).strip() + "\n"
    srt, vtt = (served.post(WAV, response_format=name).text for name in ("srt", "vtt"))
    assert vtt.startswith("WEBVTT\n\n00:00:0")
    times = re.findall(r"(\d\d):(\d\d):(\d\d),(\d{3}) -->", srt)
    starts = [int(m) * 60 + int(s) + int(t) / 1000 for _, m, s, t in times]
    assert starts == pytest.approx([each["start"] for each in segments])
    assert len(re.findall(r"^\d+$", srt, re.MULTILINE)) >= len(segments)


def test_a_stream_has_an_event_for_each_segment_that_is_closed(served: Served) -> None:
    events = list(served.client.audio.transcriptions.create(model="tiny", file=("x.wav", WAV), stream=True))
    whole = served.client.audio.transcriptions.create(model="tiny", file=("x.wav", WAV)).text
    assert [event.type for event in events] == ["transcript.text.delta"] * (len(events) - 1) + ["transcript.text.done"]
    segments = served.post(WAV, response_format="verbose_json").json()["segments"]
    assert 4 <= len(events) <= len(segments) + 1
    assert "".join(event.delta for event in events[:-1]).strip() == events[-1].text == whole  # type: ignore[union-attr]


def test_files_of_several_clients_share_batches(served: Served) -> None:
    alone = [served.post(data).text for data in MANY]
    before = served.server.metric("conveyor_engine_steps_total")
    with ThreadPoolExecutor(len(MANY)) as clients:
        together = list(clients.map(lambda data: served.post(data).text, MANY))
    assert together == alone
    steps = served.server.metric("conveyor_engine_steps_total") - before
    assert steps < before
    served.server.wait_load(running=0, waiting=0)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temperature": "1.5"}, "temperature", "temperature must be less than or equal to 1"),
        ({"temperature": "hot"}, "temperature", "temperature must be a valid number"),
        ({"language": "fr"}, "language", "language is 'fr'; this model supports de, en"),
        ({"response_format": "xml"}, "response_format", "response_format must be 'json', 'text'"),
        ({"stream": "true", "response_format": "srt"}, "stream", "not possible with response_format srt"),
        ({"prompt": "<|endoftext|>"}, "prompt", "prompt contains special tokens of the model"),
        (
            {"timestamp_granularities[]": "segment"},
            "timestamp_granularities",
            "only allowed with response_format verbo",
        ),
        ({"timestamp_granularities[]": "hour"}, "timestamp_granularities[][0]", "must be 'segment' or 'word'"),
    ],
)
def test_a_wrong_field_is_refused_with_a_sentence(
    served: Served, fields: dict[str, Any], param: str, message: str
) -> None:
    error = error_of(served.post(WAV, status=400, **fields))
    assert (error["param"], message in error["message"]) == (param, True), error


def test_bodies_that_are_no_form_with_one_file_are_refused(served: Served) -> None:
    error = error_of(served.server.post(PATH, {"file": "x"}))
    assert (error["param"], "as multipart/form-data" in error["message"]) == ("file", True)
    files = [("file", ("a.wav", WAV)), ("file", ("b.wav", WAV))]
    answer = served.server.client.post(served.server.url + PATH, files=files)
    assert "the number of file is more than the 1" in error_of(answer)["message"]
    assert (
        error_of(served.server.client.post(served.server.url + PATH, files={"x": b"y"}))["message"] == "file is missing"
    )


@pytest.mark.slow
def test_hostile_files_are_one_sentence_each_and_the_server_goes_on(served: Served) -> None:
    silence = encode(np.zeros(4_000 * 36_000, np.int8).astype(np.int16), "FLAC", 4_000)
    assert len(silence) < 2**20
    for data, message in (
        (silence, "more than 1500 s of sound"),
        (b"hello", "not an audio file"),
        (WAV[:100_000], "is a broken audio file"),
        (bytes(27 * 2**20), "longer than 27262976 bytes"),
    ):
        status = 413 if len(data) > 2**24 else 400
        assert message in error_of(served.post(data, status=status))["message"]
    assert served.server.process.poll() is None
    assert served.post(WAV).json()["text"]


@pytest.mark.slow
def test_the_largest_upload_is_answered(served: Served) -> None:
    samples = np.repeat(draw_sound(3, 8.2, 192_000)[:, np.newaxis], 4, axis=1)
    data = encode(samples, rate=192_000, subtype="FLOAT")
    assert 24 * 2**20 < len(data) < 25 * 2**20
    assert served.post(data).json()["usage"] == {"type": "duration", "seconds": 9}


def test_paths_of_other_tasks_are_refused(served: Served) -> None:
    error = error_of(served.server.post("/v1/embeddings", {"input": "x"}))
    assert (error["code"], "transcribes speech" in error["message"]) == ("wrong_task", True)


def test_answers_are_what_the_document_says(served: Served, document: Any) -> None:
    for path in (PATH, "/v1/audio/translations"):
        operation = document["paths"][path]["post"]
        assert set(operation["requestBody"]["content"]) == {"multipart/form-data"}
        content = operation["responses"]["200"]["content"]
        assert set(content) == {"application/json", "text/plain", "text/event-stream"}
        schema = {**content["application/json"]["schema"], "components": document["components"]}
        for name in ("json", "verbose_json"):
            Draft202012Validator(schema).validate(served.post(WAV, path, response_format=name).json())
        event_schema = {**find_event_schema(operation), "components": document["components"]}
        for line in served.post(WAV, path, stream="true").text.splitlines():
            if line.startswith("data: "):
                Draft202012Validator(event_schema).validate(json.loads(line.removeprefix("data: ")))


def test_a_client_that_leaves_ends_its_file(served: Served) -> None:
    long = encode(draw_sound(4, 120.0))
    with (
        pytest.raises(httpx.ReadTimeout),
        httpx.Client(timeout=httpx.Timeout(30, read=0.3)) as client,
    ):
        client.post(served.server.url + PATH, files={"file": ("x.wav", long)})
    served.server.wait_load(running=0, waiting=0)
    assert served.post(WAV).json()["text"]


@pytest.mark.parametrize("form", ["json", "verbose_json", "text", "srt", "vtt"])
def test_an_answer_has_its_receipt(served: Served, form: str) -> None:
    data, files = {"response_format": form}, {"file": ("x.wav", WAV)}
    answer = served.server.client.post(served.server.url + PATH, data=data, files=files, headers=ASKED)
    header = answer.headers.get("x-receipt")
    receipt = json.loads(header) if header else answer.json()["usage"]["receipt"]
    assert (header is None) == form.endswith("json")
    check_receipt(receipt)


def test_the_last_event_of_a_stream_has_the_receipt(served: Served) -> None:
    data, files = {"stream": "true"}, {"file": ("x.wav", WAV)}
    answer = served.server.client.post(served.server.url + PATH, data=data, files=files, headers=ASKED)
    done = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")][-1]
    check_receipt(json.loads(done)["usage"]["receipt"])


def test_the_receipts_of_requests_are_the_time_of_all_steps(served: Served) -> None:
    def run(_: int, headers: Mapping[str, str]) -> None:
        answer = httpx.post(served.server.url + PATH, files={"file": ("x.wav", WAV)}, headers=dict(headers), timeout=60)
        assert answer.status_code == 200, answer.text

    check_sum(served.server, 4, run)
