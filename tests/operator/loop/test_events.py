"""Tests that the API server accepts Events and kubectl sorts them."""

from datetime import UTC, datetime

from conveyor_operator.loop.events import Event, build_event

BODY = {
    "apiVersion": "tests.conveyor.dev/v1",
    "kind": "Widget",
    "metadata": {"name": "qwen", "namespace": "default", "uid": "uid-1"},
}
NOW = datetime(2026, 11, 21, 8, 0, 0, 123456, tzinfo=UTC)


def test_an_event_speaks_of_the_resource_and_fits_the_api() -> None:
    event = build_event(BODY, Event("OOMKilled", "x" * 5000, warning=True), NOW)
    about = event["involvedObject"]
    assert (about["apiVersion"], about["kind"], about["uid"]) == ("tests.conveyor.dev/v1", "Widget", "uid-1")
    assert event["eventTime"] == "2026-11-21T08:00:00.123456Z"
    assert event["firstTimestamp"] == event["lastTimestamp"] == "2026-11-21T08:00:00Z", "kubectl describe sorts by it"
    assert (event["type"], event["reason"], event["metadata"]["namespace"]) == ("Warning", "OOMKilled", "default")
    assert len(event["message"]) == 1024
    assert len(build_event(BODY, Event("OOMKilled", "\u00e9" * 1024), NOW)["message"].encode()) <= 1024, "of UTF-8"


def test_events_of_one_moment_have_names_in_their_order() -> None:
    made = [build_event(BODY, Event("Ready", str(number)), NOW)["metadata"]["name"] for number in range(100)]
    assert made == sorted(set(made))
