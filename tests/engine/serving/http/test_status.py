"""Tests probes, metrics, models and the headers of all answers on a real server."""

import gzip
import json
import os
import re
import socket

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.engine.chat_model import CONTEXT_TOKENS
from tests.engine.processes import EngineServer

from conveyor_engine import __version__
from conveyor_protocol.request_headers import POD_HEADER


def samples(server: EngineServer) -> dict[str, float]:
    """Return each sample that has only the label of the model's name."""
    families = text_string_to_metric_families(server.get("/metrics").text)
    return {s.name: s.value for f in families for s in f.samples if set(s.labels) == {"model_name"}}


def test_a_ready_engine_says_so(server: EngineServer) -> None:
    assert server.get("/livez").status_code == server.get("/readyz").status_code == 200
    assert server.get("/readyz").json() == {"status": "ready"}
    assert server.get("/readyz").headers[POD_HEADER] == socket.gethostname()


@pytest.mark.parametrize("base", ["", "/v1"])
def test_the_first_queries_of_the_field_s_clients_are_answered(server: EngineServer, base: str) -> None:
    assert server.get(f"{base}/health").status_code == server.get(f"{base}/ping").status_code == 200
    assert server.get(f"{base}/version").json() == {"version": __version__}


def test_the_model_is_listed(server: EngineServer) -> None:
    listed = server.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["tiny"]
    assert listed["data"][0]["max_model_len"] == CONTEXT_TOKENS
    assert listed["data"][0]["root"].endswith("/tiny"), "vLLM's load generator takes it for the tokenizer's name"
    assert server.get("/v1/models/tiny").json() == listed["data"][0]
    assert server.get("/v1/models/org/other").status_code == 404


def test_the_load_of_an_idle_engine_is_nothing(server: EngineServer) -> None:
    server.wait_load(running=0, waiting=0, draining=False, max_num_seqs=2, carried=None)
    numbers = {"server_load", "running", "waiting", "max_num_seqs", "kv_cache_usage", "carried", "warm_up_seconds"} | {
        "max_prompt_tokens",
        "limit_reason",
    }
    assert set(server.load()) == numbers | {"draining"}
    assert samples(server)["conveyor_engine_capacity"] == 2


def test_a_path_lists_all_of_its_methods(server: EngineServer) -> None:
    answer = server.client.options(server.url + "/place")
    assert (answer.status_code, {*answer.headers["allow"].split(", ")}) == (405, {"GET", "HEAD", "DELETE"})
    assert server.client.head(server.url + "/readyz").status_code == 200


def test_a_request_s_stages_and_choices_are_counted_as_vllm_does(server: EngineServer) -> None:
    before = samples(server)
    body = {"prompt": [5, 6, 7], "max_tokens": 60, "ignore_eos": True, "n": 2}  # on a busy machine, ten come at once
    assert server.post("/v1/completions", body).status_code == 200
    grown = {name: value - before.get(name, 0) for name, value in samples(server).items()}
    stages = [grown[f"vllm:request_{stage}_time_seconds_sum"] for stage in ("prefill", "decode", "inference")]
    assert stages[0] > 0
    assert stages[1] > 0
    assert stages[2] == pytest.approx(stages[0] + stages[1])
    assert 0 <= grown["vllm:request_queue_time_seconds_sum"] < grown["vllm:e2e_request_latency_seconds_sum"]
    for stage in ("queue", "prefill", "decode", "inference"):
        assert grown[f"vllm:request_{stage}_time_seconds_count"] == 2
    assert (grown["vllm:request_num_preemptions_count"], grown["vllm:request_num_preemptions_sum"]) == (2, 0)
    assert (grown["vllm:request_params_n_count"], grown["vllm:request_params_n_sum"]) == (1, 2)
    assert grown["vllm:request_max_num_generation_tokens_sum"] == 60
    assert grown["vllm:iteration_tokens_total_sum"] == 2 * 3 + 2 * 60, "prompts and generated tokens, as vLLM counts"


def test_metrics_count_what_was_done(server: EngineServer) -> None:
    before = samples(server)
    body = {"prompt": [5, 6, 7], "max_tokens": 10, "ignore_eos": True}
    assert server.post("/v1/completions", body).status_code == 200
    grown = {name: value - before.get(name, 0) for name, value in samples(server).items()}
    assert grown["vllm:prompt_tokens_total"] == 3
    assert grown["vllm:generation_tokens_total"] == 10
    assert grown["vllm:time_to_first_token_seconds_count"] == 1
    assert grown["vllm:inter_token_latency_seconds_count"] == 9
    assert grown["vllm:e2e_request_latency_seconds_count"] == 1
    assert grown["vllm:request_prompt_tokens_sum"] == 3
    assert grown["vllm:request_generation_tokens_sum"] == 10
    assert grown["conveyor_engine_batch_size_count"] == grown["conveyor_engine_steps_total"] == 10


def test_metrics_have_the_names_the_field_knows(server: EngineServer) -> None:
    text = server.get("/metrics").text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"):
        assert re.search(rf"^vllm:{name}{{", text, re.MULTILINE)
    assert 'vllm:request_success_total{finished_reason="stop",model_name="tiny"}' in text


def test_what_the_start_took_is_reported_part_by_part(server: EngineServer) -> None:
    families = text_string_to_metric_families(server.get("/metrics").text)
    (start,) = [family for family in families if family.name == "conveyor_engine_start_seconds"]
    parts = {sample.labels["part"]: sample.value for sample in start.samples}
    assert parts.keys() == {"load", "warm_up"}
    assert 0 < parts["warm_up"] < parts["load"]
    assert server.load()["warm_up_seconds"] == parts["warm_up"]


def test_the_request_id_comes_back(server: EngineServer) -> None:
    for path, body in (("/v1/completions", {"prompt": "a", "max_tokens": 1}), ("/v1/completions", {}), ("/none", {})):
        assert server.post(path, body, **{"X-Request-Id": "abc-1"}).headers["X-Request-Id"] == "abc-1"


def test_a_level_that_is_none_is_refused_of_requests_and_of_places(server: EngineServer) -> None:
    headers = {"X-Request-Level": "1001"}
    place = server.client.get(server.url + "/place", headers=headers)
    for answer in (server.post("/v1/completions", {"prompt": "a"}, **headers), place):
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "X-Request-Level"
    assert (
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, **{"X-Request-Level": "7"}).status_code == 200
    )


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 129])
def test_an_odd_request_id_is_replaced(server: EngineServer, request_id: str) -> None:
    returned = server.client.get(server.url + "/livez", headers={"X-Request-Id": request_id}).headers["X-Request-Id"]
    assert re.fullmatch(r"[0-9a-f]{32}", returned)


def test_an_unknown_path_and_a_wrong_method_are_errors_in_openais_form(server: EngineServer) -> None:
    assert server.post("/v1/softmax", {}).status_code == 404
    response = server.get("/v1/completions")
    assert response.status_code == 405
    assert response.json()["error"]["code"] == "method_not_allowed"


def test_a_body_too_long_is_refused(server: EngineServer) -> None:
    response = server.post("/v1/completions", b" " * (2**20 + 1))
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"


def test_a_body_too_long_that_does_not_say_so_is_refused(server: EngineServer) -> None:
    pieces = (b" " * 2**16 for _ in range(17))
    response = server.client.post(server.url + "/v1/completions", content=pieces)
    assert response.status_code == 413


def test_headers_too_long_are_refused(server: EngineServer) -> None:
    response = httpx.get(server.url + "/livez", headers={"X-A": "a" * 2**16})
    assert (response.status_code, response.json()["error"]["code"]) == (431, "headers_too_large")


def test_headers_without_an_end_are_refused(server: EngineServer) -> None:
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=60) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX-A: ")
        for _ in range(2):
            connection.sendall(b"a" * 2**15)
        assert connection.recv(1000).startswith(b"HTTP/1.1 431 ")


def test_a_request_that_is_not_http_gets_a_clear_error(server: EngineServer) -> None:
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=60) as connection:
        connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")


def test_long_bodies_on_one_connection_are_no_headers(server: EngineServer) -> None:
    for _ in range(2):
        assert server.post("/v1/completions", b"{" + b" " * 2**19).status_code == 400
    assert server.get("/livez").status_code == 200


def test_a_compressed_body_is_decompressed(server: EngineServer) -> None:
    body = json.dumps({"prompt": "a b", "max_tokens": 1}).encode()
    for sent, encoding, status in (
        (gzip.compress(body), "gzip", 200),
        (body, "identity", 200),
        (body, "gzip", 400),
        (gzip.compress(b" " * 2**21), "gzip", 400),
        (gzip.compress(os.urandom(2**21)), "gzip", 413),
        (body, "br", 415),
    ):
        answer = server.post("/v1/completions", sent, **{"Content-Encoding": encoding})
        assert answer.status_code == status, (sent[:9], encoding, answer.text)
