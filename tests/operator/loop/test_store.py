"""What is known of a service, collected from what was told of its objects."""

from typing import Any

from tests.operator.builders import make_child, make_deployment, make_pod

from conveyor_operator.inferenceservice.kinds import BY_NAME, INFERENCE_SERVICE
from conveyor_operator.kinds import DEPLOYMENT, POD
from conveyor_operator.loop.store import Store

KEY = ("default", "qwen")


def make_store(**values: list[Any]) -> Store:
    store = Store()
    for kind, found in values.items():
        for number, value in enumerate(found):
            store.put(BY_NAME[kind], f"{kind}-{number}", KEY, value)
    return store


def test_an_empty_store_knows_nothing() -> None:
    assert Store().uid(KEY) is None
    assert Store().services() == []


def test_everything_of_one_service_is_collected() -> None:
    store = make_store(
        InferenceService=["1"],
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


def test_of_two_objects_of_one_name_the_later_one_counts() -> None:
    store = make_store(InferenceService=["old", "new"])
    store.put(INFERENCE_SERVICE, "InferenceService-0", KEY, "old")
    assert store.uid(KEY) == "new"
    store.drop(INFERENCE_SERVICE, "InferenceService-0")
    assert store.uid(KEY) == "new"
    store.drop(INFERENCE_SERVICE, "InferenceService-1")
    assert (store.uid(KEY), store.services()) == (None, [])


def test_an_object_that_changes_hands_leaves_its_former_service() -> None:
    store = make_store(Pod=[make_pod("a")])
    assert store.put(POD, "Pod-0", ("default", "other"), make_pod("a")) == KEY
    assert store.observe(KEY).pods == ()
    assert len(store.observe(("default", "other")).pods) == 1


def test_keys_are_those_of_a_namespace() -> None:
    store = make_store(Pod=[make_pod()])
    assert store.keys(POD, None) == store.keys(POD, "default") == {"Pod-0": KEY}
    assert store.keys(POD, "other") == {}
    assert store.keys(DEPLOYMENT, None) == {}
