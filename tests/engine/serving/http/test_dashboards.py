"""Tests that the series in vLLM's published Grafana dashboards exist, with the labels that the queries select by.

The queries are those of vLLM's repository, examples/observability: prometheus_grafana/grafana.json and
dashboards/grafana/{performance,query}_statistics.json; each once, without quantile and range.
"""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.engine.processes import EngineServer

QUERIES = {
    "grafana.json": """
        sum by(le) (rate(vllm:e2e_request_latency_seconds_bucket{model_name="$model_name"}))
        rate(vllm:e2e_request_latency_seconds_sum{model_name="$model_name"})
        rate(vllm:e2e_request_latency_seconds_count{model_name="$model_name"})
        rate(vllm:prompt_tokens_total{model_name="$model_name"})
        rate(vllm:generation_tokens_total{model_name="$model_name"})
        sum by(le) (rate(vllm:inter_token_latency_seconds_bucket{model_name="$model_name"}))
        rate(vllm:inter_token_latency_seconds_sum{model_name="$model_name"})
        rate(vllm:inter_token_latency_seconds_count{model_name="$model_name"})
        vllm:num_requests_running{model_name="$model_name"}
        vllm:num_requests_waiting{model_name="$model_name"}
        sum by(le) (rate(vllm:time_to_first_token_seconds_bucket{model_name="$model_name"}))
        rate(vllm:time_to_first_token_seconds_sum{model_name="$model_name"})
        rate(vllm:time_to_first_token_seconds_count{model_name="$model_name"})
        vllm:kv_cache_usage_perc{model_name="$model_name"}
        sum by(le) (increase(vllm:request_prompt_tokens_bucket{model_name="$model_name"}))
        sum by(le) (increase(vllm:request_generation_tokens_bucket{model_name="$model_name"}))
        sum by(finished_reason) (increase(vllm:request_success_total{model_name="$model_name"}))
        rate(vllm:request_queue_time_seconds_sum{model_name="$model_name"})
        rate(vllm:request_prefill_time_seconds_sum{model_name="$model_name"})
        rate(vllm:request_decode_time_seconds_sum{model_name="$model_name"})
        rate(vllm:request_max_num_generation_tokens_sum{model_name="$model_name"})
    """,
    "performance_statistics.json": """
        rate(vllm:e2e_request_latency_seconds_sum) / rate(vllm:e2e_request_latency_seconds_count)
        sum by(le) (rate(vllm:e2e_request_latency_seconds_bucket))
        rate(vllm:time_to_first_token_seconds_sum) / rate(vllm:time_to_first_token_seconds_count)
        sum by(le) (rate(vllm:time_to_first_token_seconds_bucket))
        rate(vllm:inter_token_latency_seconds_sum) / rate(vllm:inter_token_latency_seconds_count)
        sum by(le) (rate(vllm:inter_token_latency_seconds_bucket))
        rate(vllm:generation_tokens_total)
        rate(vllm:prompt_tokens_total)
        rate(vllm:iteration_tokens_total_count)
    """,
    "query_statistics.json": """
        sum by (model_name) (rate(vllm:request_success_total{model_name=~"$Deployment_id"}))
        sum by(le, model_name) (rate(vllm:e2e_request_latency_seconds_bucket{model_name=~"$Deployment_id"}))
        sum by(le, model_name) (rate(vllm:request_prompt_tokens_bucket{model_name=~"$Deployment_id"}))
        sum by (model_name) (rate(vllm:prompt_tokens_total{model_name=~"$Deployment_id"}))
        sum by (model_name) (rate(vllm:generation_tokens_total{model_name=~"$Deployment_id"}))
    """,
}
# Read by others of the field's tools: name, and the labels that they look for.
OTHERS = {
    "vllm:num_requests_waiting_by_reason": {"reason"},
    "vllm:cache_config_info": {"block_size", "num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency"},
    "vllm:prompt_tokens_cached_total": set(),
    "vllm:request_inference_time_seconds_sum": set(),
    "vllm:request_num_preemptions_sum": set(),
    "vllm:request_params_n_sum": set(),
    "vllm:time_per_output_token_seconds_sum": set(),  # OpenCost
    "http_requests_total": {"handler", "method", "status"},
}


def read_labels(server: EngineServer) -> dict[str, set[str]]:
    """Return the labels of each series that has a sample after a request."""
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 3}).status_code == 200
    families = text_string_to_metric_families(server.get("/metrics").text)
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


@pytest.mark.parametrize("dashboard", QUERIES)
def test_a_dashboard_finds_every_series_that_it_queries(server: EngineServer, dashboard: str) -> None:
    found = read_labels(server)
    for query in QUERIES[dashboard].strip().splitlines():
        grouped = {label.strip() for by in re.findall(r"by ?\(([^)]*)\)", query) for label in by.split(",")}
        for name in re.findall(r"vllm:\w+", query):
            assert name in found, query
            assert {"model_name", *grouped} <= found[name], query


@pytest.mark.parametrize("name", OTHERS)
def test_other_tools_find_the_series_that_they_read(server: EngineServer, name: str) -> None:
    assert OTHERS[name] <= read_labels(server)[name]


def test_probes_are_no_requests_as_at_vllm(server: EngineServer) -> None:
    probes = [
        "/adapters",
        "/health",
        "/livez",
        "/load",
        "/metrics",
        "/ping",
        "/readyz",
        "/steps",
        "/v1/health",
        "/version",
    ]
    for path in (*probes, "/v1/models"):
        assert server.get(path).status_code == 200
    families = text_string_to_metric_families(server.get("/metrics").text)
    handlers = {s.labels["handler"] for family in families for s in family.samples if s.name == "http_requests_total"}
    assert "/v1/models" in handlers
    assert not handlers & {*probes}
