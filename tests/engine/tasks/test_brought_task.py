"""Tests that the task of an installed package is served end to end. Its folder, `softmax/`, is all that it adds."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.processes import IDLE, EngineServer
from tests.engine.tasks.softmax_model import write_softmax_model

LISTS = [[1.0, 2.0, 3.0], [0.5], [4.0, -4.0, 0.0, 1.0], [7.0, 7.0]]


@pytest.fixture(scope="module")
def served(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    folder = tmp_path_factory.mktemp("softmax")
    model = write_softmax_model(folder / "tiny", 2.0)
    with EngineServer(
        folder, model, packages=packages, batching_mode="dynamic", batching_window_seconds=0.2, max_num_seqs=4
    ) as server:
        yield server.wait_ready()


def expected(lists: list[list[float]]) -> list[Any]:
    return [torch.softmax(torch.tensor(numbers) / 2.0, dim=0).tolist() for numbers in lists]


def test_each_request_gets_its_own_result_from_batches_with_others(served: EngineServer) -> None:
    steps = served.metric("conveyor_engine_steps_total")
    bodies = [{"model": "tiny", "input": LISTS[:2]}, {"input": LISTS[2:]}]
    with ThreadPoolExecutor(2) as clients:
        answers = [answer.json() for answer in clients.map(lambda body: served.post("/v1/softmax", body), bodies)]
    assert [answer["model"] for answer in answers] == ["tiny", "tiny"]
    rows = [numbers for answer in answers for numbers in answer["data"]]
    for ours, theirs in zip(rows, expected(LISTS), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)
    batches = served.metric("conveyor_engine_steps_total") - steps
    closes = [sample for sample in served.get("/metrics").text.splitlines() if "engine_batch_close_total{" in sample]
    assert batches < len(LISTS), "lists of one body share a batch at least"
    assert closes, "batches close by the window, or because they are full"
    assert served.metric("vllm:request_success_total", finished_reason="stop") >= len(LISTS)


def test_it_is_warm_and_its_log_says_so(served: EngineServer) -> None:
    assert "event=warmed_up" in served.log
    assert served.load()["max_num_seqs"] == 4


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/v1/completions", {"prompt": "a"}, "generates no text"),
        ("/v1/chat/completions", {"messages": []}, "generates no text"),
        ("/v1/embeddings", {"input": "a"}, "makes no embeddings"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "makes no embeddings and ranks no documents"),
        ("/classify", {"input": "a"}, "classifies no texts"),
    ],
)
def test_it_refuses_the_paths_of_other_tasks(served: EngineServer, path: str, body: object, sentence: str) -> None:
    answer = served.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "wrong_task")
    assert error["message"] == f"this engine's model makes probabilities and {sentence}; it answers /v1/softmax"


def test_a_model_of_another_task_refuses_its_path(packages: Path, chat_model: Path, tmp_path: Path) -> None:
    with EngineServer(tmp_path, chat_model, IDLE, packages=packages) as server:
        answer = server.wait_ready().post("/v1/softmax", {"input": LISTS})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "wrong_task")
        assert "generates text and makes no probabilities; it answers /v1/chat/completions, /v1/comp" in answer.text
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_its_errors_name_the_field(served: EngineServer) -> None:
    for body, param in (({"input": [[0.0] * 9]}, "input"), ({"input": [[]]}, "input[0]"), ({}, "input")):
        answer = served.post("/v1/softmax", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert served.post("/v1/softmax", {"model": "other", "input": LISTS}).status_code == 404
    assert served.post("/v1/softmax", {"input": LISTS, "unknown": 1}).status_code == 200
    assert served.metric("conveyor_engine_ignored_fields_total", kind="softmax") == 1


def test_a_result_that_is_not_finite_is_an_error_of_its_request_alone(served: EngineServer) -> None:
    with ThreadPoolExecutor(2) as clients:
        bad, good = clients.map(lambda lists: served.post("/v1/softmax", {"input": lists}), [[[1e39]], LISTS])
    assert (bad.status_code, bad.json()["error"]["code"]) == (500, "generation_failed")
    assert "the model's result is not finite" in bad.text
    assert good.status_code == 200


def test_the_error_of_a_list_names_the_input(served: EngineServer) -> None:
    lists = [[1.0, 2.0]] * 20
    answer = served.post("/v1/softmax", {"input": [*lists[:13], [1e39], *lists]})
    assert answer.json()["error"]["message"] == "input[13]: the model's result is not finite (NaN or infinity)"
    assert served.post("/v1/softmax", {"input": lists}).json()["data"] == expected(lists)
    served.wait_load(waiting=0, running=0)


def test_a_padded_batch_closes_by_cost_in_the_unit_of_the_task(packages: Path, tmp_path: Path) -> None:
    model = write_softmax_model(tmp_path / "tiny", 2.0)
    with EngineServer(
        tmp_path / "server", model, packages=packages, batching_mode="dynamic", batching_window_seconds=3.0,
        max_num_seqs=8, max_num_batched_tokens=24, length_grouping="off",
    ) as server:  # fmt: skip
        answer = server.wait_ready().post("/v1/softmax", {"input": [[1.0] * 8, [2.0] * 2, [3.0] * 2, [4.0] * 2]})
        assert answer.status_code == 200
        assert server.metric("conveyor_engine_batch_close_total", reason="cost") == 1, "three lists, as long as eight"
        assert server.metric("conveyor_engine_batch_cost_sum", unit="numbers") == 24 + 2
        assert server.metric("conveyor_engine_batch_padding_ratio_sum") == pytest.approx(12 / 24)


def test_the_document_describes_its_path(served: EngineServer) -> None:
    document = served.get("/openapi.json").json()
    body = document["paths"]["/v1/softmax"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/SoftmaxRequest"}
    assert set(document["components"]["schemas"]["SoftmaxRequest"]["properties"]) == {"model", "priority", "input"}
    assert "Probabilities" in document["components"]["schemas"]
    assert served.metric("conveyor_engine_http_responses_total", route="/openapi.json", status="200") >= 1


def test_a_model_whose_results_are_nowhere_finite_does_not_start(packages: Path, tmp_path: Path) -> None:
    with EngineServer(tmp_path, write_softmax_model(tmp_path / "broken", 0.0), packages=packages) as server:
        assert server.wait_exit() == 1
        assert "the model's probabilities are not finite" in server.termination()["message"]


def test_a_task_that_is_not_installed_is_refused(tmp_path: Path) -> None:
    with EngineServer(tmp_path, write_softmax_model(tmp_path / "tiny", 1.0), task="softmax") as server:
        assert server.wait_exit() == 2
        assert (
            "`task` must be one of auto, generate, embed, classify, rerank, transcribe, imageclassify, imagegenerate, "
            "custom, not "
            "'softmax'" in server.termination()["message"]
        )
