"""huggingface_hub's InferenceClient with text-embeddings-inference's path `/embed`."""

import asyncio

import numpy as np
from checks import URL, run
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import BadRequestError

BASE = URL.removesuffix("/v1")
TEXTS = ["open a file", "the with statement"]


def one_text() -> None:
    (vector,) = InferenceClient(f"{BASE}/embed").feature_extraction(TEXTS[0])
    assert abs(np.linalg.norm(vector) - 1) < 1e-3


def several() -> None:
    client = InferenceClient(f"{BASE}/embed")
    vectors = client.feature_extraction(TEXTS, normalize=True, truncate=True, truncation_direction="left")
    assert vectors.shape[0] == 2
    assert np.abs(vectors[0] - client.feature_extraction(TEXTS[0])[0]).max() < 0.02


def asynchronous() -> None:
    answer = asyncio.run(AsyncInferenceClient(f"{BASE}/embed").feature_extraction(TEXTS))
    assert answer.shape[0] == 2


def errors() -> None:
    try:
        InferenceClient(f"{BASE}/embed").feature_extraction("")
    except BadRequestError as error:
        text = str(error)
    else:
        raise AssertionError("an empty text was embedded")
    assert "inputs must not be an empty text" in text


run(one_text, several, asynchronous, errors)
