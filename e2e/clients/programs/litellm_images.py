"""litellm with a service that generates images."""

import asyncio
from base64 import b64decode

import litellm
from checks import MODEL, URL, run

OWN = {"seed": 1, "num_inference_steps": 10}
CALL = {"api_base": URL, "api_key": "none", "prompt": "a red star", "extra_body": OWN}


def image_generation() -> None:
    (item,) = litellm.image_generation(model=f"openai/{MODEL}", **CALL).data
    assert b64decode(item["b64_json"]).startswith(b"\x89PNG")


def several() -> None:
    assert len(litellm.image_generation(model=f"openai/{MODEL}", n=2, **CALL).data) == 2


def asynchronous() -> None:
    assert len(asyncio.run(litellm.aimage_generation(model=f"openai/{MODEL}", **CALL)).data) == 1


def errors() -> None:
    try:
        litellm.image_generation(model="openai/no-such", **CALL)
    except litellm.NotFoundError:
        return
    raise AssertionError("an unknown model was served")


run(image_generation, several, asynchronous, errors)
