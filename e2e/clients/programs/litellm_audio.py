"""litellm with a service that transcribes."""

import asyncio
from pathlib import Path

import litellm
import openai
from checks import MODEL, URL, run

FILE = (Path(__file__).parents[3] / "examples" / "words.mp3").read_bytes()
CALL = {"api_base": URL, "api_key": "none", "file": ("words.mp3", FILE)}


def transcription() -> None:
    answers = [litellm.transcription(model=f"{provider}/{MODEL}", **CALL) for provider in ("openai", "hosted_vllm")]
    assert len(answers[0].text.split()) > 1
    assert answers[1].text == answers[0].text


def verbose_json() -> None:
    answer = litellm.transcription(model=f"openai/{MODEL}", response_format="verbose_json", **CALL)
    assert answer["segments"]


def asynchronous() -> None:
    assert asyncio.run(litellm.atranscription(model=f"openai/{MODEL}", **CALL)).text


def errors() -> None:
    try:
        litellm.transcription(model="openai/no-such", **CALL)
    except openai.NotFoundError:  # litellm raises the error of the client that it uses
        return
    raise AssertionError("an unknown model was served")


run(transcription, verbose_json, asynchronous, errors)
