"""kserve's client for the Open Inference Protocol, with a service that computes tensors."""

import asyncio

import numpy as np
from checks import MODEL, URL, run
from httpx import HTTPStatusError
from kserve import InferenceRESTClient, InferInput, InferRequest, InferResponse, RESTConfig

BASE = URL.removesuffix("/v1")
ROWS = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)


def send(rows: np.ndarray, *, binary: bool, model: str = MODEL) -> InferResponse:
    async def infer() -> InferResponse:
        client = InferenceRESTClient(RESTConfig(protocol="v2", retries=0))
        tensor = InferInput("input", list(rows.shape), "FP32")
        tensor.set_data_from_numpy(rows, binary_data=binary)
        return await client.infer(BASE, InferRequest(model, [tensor]), model_name=model)

    return asyncio.run(infer())


def compute(rows: np.ndarray, *, binary: bool) -> np.ndarray:
    (output,) = send(rows, binary=binary).outputs
    assert output.name == "output"
    return output.as_numpy()


def readiness() -> None:
    async def look() -> list[bool]:
        client = InferenceRESTClient(RESTConfig(protocol="v2", retries=0))
        return [
            await client.is_server_live(BASE),
            await client.is_server_ready(BASE),
            await client.is_model_ready(BASE, MODEL),
        ]

    assert asyncio.run(look()) == [True, True, True]


def tensors() -> None:
    assert compute(ROWS, binary=False).shape == (5, 3)


def tensors_as_bytes() -> None:
    assert np.allclose(compute(ROWS, binary=True), compute(ROWS, binary=False), atol=1e-5)


def each_row_alone() -> None:
    whole = compute(ROWS, binary=True)
    for number in range(len(ROWS)):
        assert np.allclose(compute(ROWS[number : number + 1], binary=True)[0], whole[number], atol=1e-5)


def errors() -> None:
    for rows, model, status in ((ROWS, "no-such", 404), (ROWS[:, :3], MODEL, 400)):
        try:
            send(rows, binary=False, model=model)
        except HTTPStatusError as error:
            found = error.response.status_code
        else:
            found = 200
        assert found == status, found


run(readiness, tensors, tensors_as_bytes, each_row_alone, errors)
