"""Tests services and slices that cannot be read: they keep their last readable state and harm no other."""

from typing import Any

import pytest
from tests.gateway.cluster import make_endpoint, make_service, make_slice
from tests.gateway.watching.test_catalog import Changes, replace


def test_a_service_that_cannot_be_read_keeps_its_last_readable_state(caplog: pytest.LogCaptureFixture) -> None:
    changes = Changes()
    changes.catalog.services.put(make_service("qwen", "default", queue={"maxRequests": 7}))
    bad = make_service("qwen", "default", queue={"maxRequests": "many"})
    replace(changes.catalog.services, [bad, make_service("worse", "default", batching={"maxBatchSize": "many"})], "")
    assert set(changes.catalog.directory.services) == {"default/qwen"}
    assert changes.catalog.directory.services["default/qwen"].max_queued_requests == 7
    assert "key=default/worse " in caplog.text


def test_what_cannot_be_read_is_reported_once_and_counted_until_it_can_be_or_is_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    services = Changes().catalog.services
    bad, worse = (make_service(name, "a", batching={"maxBatchSize": "many"}) for name in ("bad", "worse"))
    nameless_spec = {"metadata": {"name": "empty", "namespace": "a"}}  # all that is left of one of another shape
    for _ in range(3):
        replace(services, [bad, worse, nameless_spec], "")
        services.put(bad)
    assert len(services.unreadable) == 3
    assert [caplog.text.count(f"key=a/{name} ") for name in ("bad", "worse", "empty")] == [1, 1, 1]
    services.put(make_service("bad", "a"))
    services.delete(worse)
    assert len(services.unreadable) == 1
    replace(services, [], "b")
    assert len(services.unreadable) == 1
    replace(services, [], "a")
    assert len(services.unreadable) == 0


def test_of_a_namespace_with_many_that_cannot_be_read_a_few_are_logged_and_those_of_others_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("conveyor_kube.unreadable._MAX_COUNTED", 40)
    services = Changes().catalog.services
    bodies = [make_service(f"s{number}", "evil", batching={"maxBatchSize": "many"}) for number in range(50)]
    for body in bodies * 2:
        services.put(body)
    services.put(make_service("bad", "good", batching={"maxBatchSize": "many"}))
    assert len(services.unreadable) == 41
    assert [record.getMessage().split()[0] for record in caplog.records] == [
        *["event=object_unreadable"] * 10,
        "event=objects_unreadable",
        "event=object_unreadable",
    ]
    assert "kind=service namespace=evil logged=10 consequence=more are counted and not logged" in caplog.text
    for body in bodies:
        services.delete(body)
    services.delete(make_service("bad", "good"))
    assert (len(services.unreadable), services.unreadable._keys) == (0, {})


def test_a_namespace_with_more_than_its_share_keeps_what_is_known_and_harms_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("conveyor_gateway.watching.catalog.MAX_SERVICES", 2)
    monkeypatch.setattr("conveyor_gateway.watching.slices.MAX_ENGINES", 3)
    catalog = Changes().catalog
    for name in ("a", "b", "c"):
        catalog.services.put(make_service(name, "evil"))
        endpoints = [make_endpoint(f"10.0.{ord(name)}.{number}") for number in range(2)]
        catalog.slices.put(make_slice(name, "evil", name, 8000, *endpoints))
    catalog.services.put(make_service("a", "evil", queue={"maxRequests": 7}))
    catalog.services.put(make_service("good", "good"))
    catalog.slices.put(make_slice("good", "good", "good", 8000, make_endpoint("10.0.0.1")))
    assert set(catalog.directory.services) == {"evil/a", "evil/b", "good/good"}
    assert catalog.directory.services["evil/a"].max_queued_requests == 7
    assert [len(catalog.engines(f"evil/{name}")) for name in ("a", "b", "c")] == [2, 0, 0]
    assert len(catalog.engines("good/good")) == 1
    assert "kind=service key=evil/c " in caplog.text
    assert "more than 2 InferenceServices" in caplog.text
    catalog.services.delete(make_service("a", "evil"))
    catalog.slices.delete(make_slice("a", "evil", "a", 8000))
    catalog.services.put(make_service("c", "evil"))
    catalog.slices.put(make_slice("c", "evil", "c", 8000, make_endpoint("10.0.0.3")))
    assert "evil/c" in catalog.directory.services
    assert catalog.engines("evil/c") == ("10.0.0.3:8000",)


def test_a_parser_that_recurses_too_deep_harms_nobody() -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = {"a": deep}
    services = Changes().catalog.services
    replace(services, [make_service("deep", "a", model=deep), make_service("good", "a")], "")
    assert len(services.unreadable) == 1
    while isinstance(deep, dict):  # taken apart from outside: to be forgotten at once would recurse as well
        deep = deep.pop("a")


@pytest.mark.parametrize("odd", [{"ports": [None]}, {"endpoints": [{}]}, {"endpoints": [{"addresses": []}]}])
def test_a_slice_that_cannot_be_read_keeps_its_last_readable_state_and_harms_no_other(
    odd: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    changes = Changes()
    changes.catalog.slices.put(make_slice("one", "default", "qwen", 8000, make_endpoint("10.0.0.1")))
    bad = make_slice("one", "default", "qwen", 8000, **odd)
    replace(changes.catalog.slices, [bad, make_slice("two", "default", "qwen", 8000, make_endpoint("10.0.0.2"))], "")
    assert changes.catalog.engines("default/qwen") == ("10.0.0.1:8000", "10.0.0.2:8000")
    assert "kind=slice key=default/one " in caplog.text
