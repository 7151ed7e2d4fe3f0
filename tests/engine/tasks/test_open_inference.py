"""Tests the Open Inference Protocol on a real server with Triton's client. The task is the one of `softmax/`."""

import json
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from tests.engine.processes import IDLE, EngineServer
from tests.engine.receipts import ASKED, check_receipt
from tests.engine.tasks.softmax_model import write_softmax_model
from tritonclient.utils import InferenceServerException

ROWS = np.array([[1, 2, 3], [0.5, 0.25, -4], [7, 7, 7]], dtype=np.float32)


@pytest.fixture(scope="module")
def served(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    folder = tmp_path_factory.mktemp("served")
    model = write_softmax_model(folder / "tiny", 2.0)
    how = {"batching_mode": "dynamic", "batching_window_seconds": 0.2, "max_num_seqs": 4}
    with EngineServer(folder, model, packages=packages, **how) as server:
        yield server.wait_ready()


@pytest.fixture
def client(served: EngineServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(served.url.removeprefix("http://"), network_timeout=60) as client:
        yield client


def expect(rows: Any) -> Any:
    powers = np.exp(rows / 2.0)
    return powers / powers.sum(axis=1, keepdims=True)


def infer(client: triton.InferenceServerClient, rows: Any, binary: bool = True, **more: Any) -> Any:
    numbers = triton.InferInput("numbers", list(rows.shape), "FP32")
    numbers.set_data_from_numpy(rows, binary_data=binary)
    return client.infer("tiny", [numbers], **more)


def test_the_server_and_its_model_describe_themselves(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.is_model_ready("tiny", "1")
    assert not client.is_model_ready("tiny", "2")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata() == {
        "name": "conveyor", "version": client.get_server_metadata()["version"], "extensions": ["binary_tensor_data"],
    }  # fmt: skip
    metadata = client.get_model_metadata("tiny")
    assert metadata == client.get_model_metadata("tiny", "1") == {
        "name": "tiny", "versions": ["1"], "platform": "conveyor_softmax",
        "inputs": [{"name": "numbers", "datatype": "FP32", "shape": [-1, -1]}],
        "outputs": [{"name": "probabilities", "datatype": "FP32", "shape": [-1, -1]}],
    }  # fmt: skip


@pytest.mark.parametrize("sends_binary", [True, False])
@pytest.mark.parametrize("binary_output", [True, False, None])
def test_a_batch_of_tensors_comes_back(
    client: triton.InferenceServerClient, sends_binary: bool, binary_output: bool | None
) -> None:
    outputs = (
        None if binary_output is None else [triton.InferRequestedOutput("probabilities", binary_data=binary_output)]
    )
    answer = infer(client, ROWS, sends_binary, outputs=outputs, request_id="7", model_version="1")
    assert np.abs(answer.as_numpy("probabilities") - expect(ROWS)).max() < 1e-6
    response = answer.get_response()
    assert (response["model_name"], response["model_version"], response["id"]) == ("tiny", "1", "7")
    assert ("parameters" in answer.get_output("probabilities")) == (binary_output is not False)


def test_items_of_several_clients_share_batches(served: EngineServer) -> None:
    def send(row: int) -> Any:
        body = {"inputs": [{"name": "numbers", "shape": [1, 3], "datatype": "FP32", "data": ROWS[row].tolist()}]}
        return served.post("/v2/models/tiny/infer", body).json()

    steps = served.metric("conveyor_engine_steps_total")
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(send, [0, 1, 2, 0, 1, 2, 0, 1]))
    assert served.metric("conveyor_engine_steps_total") - steps < 8
    for row, answer in zip([0, 1, 2, 0, 1, 2, 0, 1], answers, strict=True):
        assert answer["outputs"][0]["data"] == pytest.approx(expect(ROWS)[row].tolist(), abs=1e-6)


def test_a_long_answer_is_written_in_pieces(served: EngineServer) -> None:
    rows = np.linspace(-1, 1, 8 * 2000, dtype=np.float32).reshape(2000, 8)
    data = {"name": "numbers", "shape": [2000, 8], "datatype": "FP32", "data": rows.tolist()}
    output = served.post("/v2/models/tiny/infer", {"inputs": [data]}).json()["outputs"][0]
    assert output["shape"] == [2000, 8]
    assert np.abs(np.array(output["data"]).reshape(2000, 8) - expect(rows)).max() < 1e-6


def test_an_error_is_a_sentence_that_the_client_raises(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="numbers has \\[batch, n\\]; n is 1 to 8") as caught:
        infer(client, np.zeros((2, 9), dtype=np.float32))
    assert caught.value.status() == "400"
    with pytest.raises(InferenceServerException, match="'other' is not served here; 'tiny' is"):
        client.get_model_metadata("other")
    with pytest.raises(InferenceServerException, match="the model has only version '1'"):
        client.get_model_metadata("tiny", "3")


@pytest.mark.parametrize("length", ["-1", "x", "1e3", "", "9" * 40, "99999"])
def test_a_header_that_is_no_length_is_refused(served: EngineServer, length: str) -> None:
    answer = served.post("/v2/models/tiny/infer", b"{}", **{"Inference-Header-Content-Length": length})
    assert (answer.status_code, answer.json()["param"]) == (400, "Inference-Header-Content-Length")
    assert answer.json()["code"] == "invalid_value"


def test_a_hostile_body_is_refused_and_loses_nothing_else(
    served: EngineServer, client: triton.InferenceServerClient
) -> None:
    begin = b'{"inputs":[{"name":"numbers","datatype":"FP32",'
    for body in (
        begin + b'"shape":[1,3],"data":' + b"[" * 900_000,
        begin + b'"shape":[2147483647,8],"data":[]}]}',
        begin + b'"shape":[1,3],"data":[[]' + b",[]" * 200_000 + b"]}]}",
        b"\0" * 1_000_000,
    ):
        answer = served.post("/v2/models/tiny/infer", body)
        assert answer.status_code == 400, answer.text
    assert infer(client, ROWS).as_numpy("probabilities").shape == (3, 3)


def test_a_result_that_is_not_finite_fails_its_request(served: EngineServer) -> None:
    head = {"inputs": [{"name": "numbers", "shape": [1, 1], "datatype": "FP32", "parameters": {"binary_data_size": 4}}]}
    text = json.dumps(head).encode()
    sizes = {"Inference-Header-Content-Length": str(len(text))}
    answer = served.post("/v2/models/tiny/infer", text + struct.pack("<f", float("inf")), **sizes)
    assert (answer.status_code, answer.json()["code"]) == (500, "generation_failed")
    assert "not finite" in answer.json()["error"]


@pytest.mark.parametrize("path", ["tiny", "other", "tiny/versions/1"])
def test_a_path_to_infer_allows_no_other_method(served: EngineServer, path: str) -> None:
    answer = served.get(f"/v2/models/{path}/infer")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["code"] == "method_not_allowed"


def test_models_of_other_tasks_take_no_tensors(chat_model: Path, tmp_path: Path) -> None:
    with EngineServer(tmp_path, chat_model, IDLE) as server:
        name = server.wait_ready().get("/v1/models").json()["data"][0]["id"]
        answers = [server.get(f"/v2/models/{name}"), server.post(f"/v2/models/{name}/infer", {"inputs": []})]
        for answer in answers:
            assert (answer.status_code, answer.json()["code"]) == (400, "wrong_task")
            assert (
                "takes no tensors; it answers /v1/chat/completions, /v1/completions, /v1/responses, "
                in answer.json()["error"]
            )
        assert server.get(f"/v2/models/{name}/ready").json() == {"name": name, "ready": True}
        assert server.get("/v2/models/a%2Fb/ready").status_code == 404


def test_an_answer_has_its_receipt_in_a_header(served: EngineServer) -> None:
    inputs = [{"name": "numbers", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]
    answer = served.post("/v2/models/tiny/infer", {"inputs": inputs}, **ASKED)
    assert answer.status_code == 200, answer.text
    check_receipt(json.loads(answer.headers["x-receipt"]))
