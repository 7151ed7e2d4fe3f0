"""Tests the series of services that come and go, and those of clients that proxies name."""

from functools import partial

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Counter as ReferenceCounter
from prometheus_client import Histogram as ReferenceHistogram
from prometheus_client.parser import text_string_to_metric_families
from tests.lines_run import count_lines

from conveyor_gateway.recording.metrics import OTHER_CLIENTS, Metrics
from conveyor_gateway.recording.named_clients import MAX_NAMED
from conveyor_gateway.recording.series import LINES_A_PIECE, Counters, Histograms
from conveyor_protocol.usage import UsedTokens

LABELS = {"namespace": "team", "inference_service": "qwen"}


def count_all(metrics: Metrics, service: str = "team/qwen") -> None:
    metrics.count_request(service, 200)
    metrics.observe_answer(service, 0.0, 0.1)
    metrics.observe_class_wait(service, "urgent", 0.0)
    metrics.count_used(service, 0.1, UsedTokens(1, 0, 2))


def read(metrics: Metrics) -> dict[str, float]:
    """Return the service's series without those of histograms' buckets, by name."""
    families = text_string_to_metric_families(b"".join(metrics.write_page()).decode())
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


def read_clients(metrics: Metrics, name: str, label: str = "client") -> dict[str, float]:
    families = text_string_to_metric_families(b"".join(metrics.write_page()).decode())
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return {sample.labels[label]: sample.value for sample in samples}


def test_tokens_of_named_clients_have_a_limited_number_of_series() -> None:
    metrics = Metrics()
    for number in range(MAX_NAMED + 5):
        metrics.count_used_by_client(("team/qwen", f"client-{number}", "", "team/ann"), UsedTokens(3, 0, 2))
    metrics.count_used_by_client(("team/qwen", "client-0", "", "team/ann"), UsedTokens(1, 0, 1))
    prompts = read_clients(metrics, "conveyor_gateway_client_prompt_tokens_total")
    answers = read_clients(metrics, "conveyor_gateway_client_generation_tokens_total")
    assert len(prompts) == len(answers) == MAX_NAMED + 1
    assert (prompts["client-0"], prompts[OTHER_CLIENTS]) == (4, 15)
    assert (answers["client-0"], answers[OTHER_CLIENTS]) == (3, 10)
    assert read_clients(metrics, "conveyor_gateway_client_busy_seconds_total", "owner").keys() == {
        "team/ann",
        OTHER_CLIENTS,
    }
    metrics.drop_service("team/qwen")
    assert read_clients(metrics, "conveyor_gateway_client_prompt_tokens_total") == {}
    metrics.count_used_by_client(("team/other", "client-0", "", ""), UsedTokens(1, 0, 1))
    assert read_clients(metrics, "conveyor_gateway_client_prompt_tokens_total") == {"client-0": 1}


def make_many(num_services: int) -> Metrics:
    metrics = Metrics()
    for number in range(num_services):
        count_all(metrics, f"other/{number}")
    count_all(metrics)
    return metrics


def test_the_end_of_a_service_costs_nothing_for_other_services() -> None:
    few, many = make_many(2), make_many(500)
    costs = [count_lines(partial(metrics.drop_service, "team/qwen"), "/") for metrics in (few, many)]
    assert costs[0] == costs[1] < 300


def test_the_series_of_a_removed_class_are_gone() -> None:
    metrics = make_many(2)
    metrics.drop_class("team/qwen", "urgent")
    names = read(metrics)
    assert "conveyor_gateway_class_queue_wait_seconds_count" not in names
    assert "conveyor_gateway_queue_wait_seconds_count" in names
    metrics.drop_service("team/qwen")
    assert read(metrics) == {}


def test_a_page_of_many_services_is_written_in_small_pieces() -> None:
    metrics = make_many(1_000)
    for piece in metrics.write_page():
        assert piece.count(b"\n") <= LINES_A_PIECE + 2


def test_services_may_come_and_go_while_the_page_is_written() -> None:
    metrics = make_many(300)
    pieces = []
    for number, piece in enumerate(metrics.write_page()):
        pieces.append(piece)
        metrics.drop_service(f"other/{number}")
        count_all(metrics, f"new/{number}")
    families = list(text_string_to_metric_families(b"".join(pieces).decode()))
    assert len({family.name for family in families}) == len(families)


@given(st.lists(st.floats(0, 700)), st.lists(st.floats(0, 1e20)), st.text(st.characters(codec="utf-8"), max_size=9))
def test_the_text_is_that_of_prometheus_own_client(observed: list[float], added: list[float], label: str) -> None:
    registry, bounds = CollectorRegistry(), (0.001, 0.5, 1, 600)
    waits = ReferenceHistogram("wait_seconds", "Waits.", ["name"], buckets=bounds, registry=registry).labels(label)
    sent = ReferenceCounter("sent", "Sent.", ["name"], registry=registry).labels(label)
    families = Histograms("wait_seconds", "Waits.", ("name",), bounds), Counters("sent_total", "Sent.", ("name",))
    for value in observed:
        waits.observe(value)
        (families[0].find((label,)) or families[0].add((label,))).observe(value)
    for value in added:
        sent.inc(value)
        (families[1].find((label,)) or families[1].add((label,))).inc(value)
    text = b"".join(piece for family in families for piece in family.write()).decode()
    assert read_samples(text) >= {
        each
        for each in read_samples(generate_latest(registry).decode())
        if observed
        if added
        if "_created" not in each[0]
    }


def read_samples(text: str) -> set[tuple[str, tuple[tuple[str, str], ...], float]]:
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    return {(sample.name, tuple(sorted(sample.labels.items())), sample.value) for sample in samples}
