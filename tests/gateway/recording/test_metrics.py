"""Tests the series of services that come and go, and those of clients that proxies name."""

from prometheus_client.parser import text_string_to_metric_families

from conveyor_gateway.recording.metrics import MAX_NAMED, OTHER_CLIENTS, Metrics
from conveyor_gateway.usage import Usage

LABELS = {"namespace": "team", "inference_service": "qwen"}


def count_all(metrics: Metrics) -> None:
    metrics.count_request("team/qwen", 200)
    metrics.observe_answer("team/qwen", 0.0, 0.1)
    metrics.count_used("team/qwen", 0.1, Usage(1, 0, 2))


def read(metrics: Metrics) -> dict[str, float]:
    """Return the service's series without those of histograms' buckets, by name."""
    families = text_string_to_metric_families(metrics.render().decode())
    samples = [sample for family in families for sample in family.samples if LABELS.items() <= sample.labels.items()]
    return {sample.name: sample.value for sample in samples if "le" not in sample.labels}


def test_the_series_of_a_deleted_service_are_gone_and_begin_again_with_a_new_one() -> None:
    metrics = Metrics()
    count_all(metrics)
    count_all(metrics)
    assert read(metrics)["conveyor_gateway_requests_total"] == 2
    metrics.drop_service("team/qwen")
    assert read(metrics) == {}
    count_all(metrics)
    found = read(metrics)
    assert found["conveyor_gateway_requests_total"] == found["conveyor_gateway_queue_wait_seconds_count"] == 1
    assert found["conveyor_gateway_generation_tokens_total"] == 2


def read_clients(metrics: Metrics, name: str) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.render().decode())
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return {sample.labels["client"]: sample.value for sample in samples}


def test_tokens_of_named_clients_have_a_limited_number_of_series() -> None:
    metrics = Metrics()
    for number in range(MAX_NAMED + 5):
        metrics.count_used_by_client("team/qwen", f"client-{number}", Usage(3, 0, 2))
    metrics.count_used_by_client("team/qwen", "client-0", Usage(1, 0, 1))
    prompts = read_clients(metrics, "conveyor_gateway_client_prompt_tokens_total")
    answers = read_clients(metrics, "conveyor_gateway_client_generation_tokens_total")
    assert len(prompts) == len(answers) == MAX_NAMED + 1
    assert (prompts["client-0"], prompts[OTHER_CLIENTS]) == (4, 15)
    assert (answers["client-0"], answers[OTHER_CLIENTS]) == (3, 10)
    metrics.drop_service("team/qwen")
    assert read_clients(metrics, "conveyor_gateway_client_prompt_tokens_total") == {}
    metrics.count_used_by_client("team/other", "client-0", Usage(1, 0, 1))
    assert read_clients(metrics, "conveyor_gateway_client_prompt_tokens_total") == {"client-0": 1}
