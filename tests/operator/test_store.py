"""What is known of a service, collected from the indexes."""

from typing import Any

from tests.operator.builders import make_child, make_deployment, make_pod

from conveyor_operator.kinds import CHILDREN, GRANDCHILDREN, INFERENCE_SERVICE
from conveyor_operator.store import Store

KEY = ("default", "qwen")


def make_store(**values: list[Any]) -> Store:
    store = Store()
    kinds = (INFERENCE_SERVICE, *CHILDREN, *GRANDCHILDREN)
    store.bind({kind: {KEY: values[kind.kind]} if kind.kind in values else {} for kind in kinds})
    return store


def test_an_unbound_store_knows_nothing() -> None:
    assert Store().resource(KEY) is None
    assert Store().services() == []


def test_everything_of_one_service_is_collected() -> None:
    store = make_store(
        InferenceService=[{"metadata": {}}],
        Deployment=[(make_child(), make_deployment(2))],
        Service=[(make_child("Service", "qwen"), None), (make_child("Service", "qwen-engine"), None)],
        Pod=[make_pod("b"), make_pod("a")],
        EndpointSlice=[1, 2],
    )
    observed = store.observe(KEY)
    assert store.services() == [KEY]
    assert set(observed.children) == {("Deployment", "qwen-engine"), ("Service", "qwen"), ("Service", "qwen-engine")}
    assert observed.deployment == make_deployment(2)
    assert [pod.name for pod in observed.pods] == ["a", "b"]
    assert observed.ready_endpoints == 3


def test_a_copy_with_our_label_is_not_taken_for_the_deployment() -> None:
    ours, copy = (make_child(), make_deployment(2)), (make_child(name="copy"), make_deployment(9))
    for order in ([ours, copy], [copy, ours]):
        assert make_store(Deployment=order).observe(KEY).deployment == make_deployment(2)


def test_other_services_are_not_mixed_in() -> None:
    store = make_store(Deployment=[(make_child(), make_deployment())], Pod=[make_pod()], EndpointSlice=[1])
    observed = store.observe(("default", "other"))
    assert (observed.children, observed.deployment, observed.pods, observed.ready_endpoints) == ({}, None, (), 0)
