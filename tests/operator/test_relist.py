"""What was deleted while a watch was broken is forgotten, whatever else there is to list."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.operator.api_proxy import Call
from tests.operator.stage import Stage, wait_until

from conveyor_operator.kinds import AUTOSCALER, POD, WATCHED, Kind

AUTOSCALING = {"minReplicas": 1, "maxReplicas": 5}


@contextmanager
def watches_expired(stage: Stage, *kinds: Kind) -> Iterator[None]:
    """What happens to these kinds within is told by no watch: none can be resumed, so Kopf lists anew."""
    stage.proxy.sever()
    yield
    for kind in kinds:
        stage.proxy.fail(lambda call, kind=kind: (call.verb, call.resource) == ("watch", kind.plural), 410)
    stage.proxy.severed = False
    wait_until("all expired", lambda: all(fault.hits for fault in stage.proxy.faults), 60)


def test_a_child_that_was_deleted_while_watches_expired_comes_back(stage: Stage) -> None:
    """The only one of its kind: of an empty list Kopf tells nothing."""
    with stage.operator():
        stage.space.make_service(autoscaling=AUTOSCALING)
        wait_until("the HPA", lambda: stage.space.get("HorizontalPodAutoscaler", "qwen-engine"))
        stage.proxy.wait_quiet()
        with watches_expired(stage, *WATCHED):
            stage.space.delete("HorizontalPodAutoscaler", "qwen-engine")
        wait_until("the HPA again", lambda: stage.space.get("HorizontalPodAutoscaler", "qwen-engine"))


def test_a_child_comes_back_whose_watch_alone_expired(stage: Stage) -> None:
    """No other kind's list hints at it."""
    with stage.operator():
        stage.space.make_service(autoscaling=AUTOSCALING)
        wait_until("the HPA", lambda: stage.space.get("HorizontalPodAutoscaler", "qwen-engine"))
        stage.proxy.wait_quiet()
        with watches_expired(stage, AUTOSCALER):
            stage.space.delete("HorizontalPodAutoscaler", "qwen-engine")
        wait_until("the HPA again", lambda: stage.space.get("HorizontalPodAutoscaler", "qwen-engine"))


def test_a_service_made_again_while_watches_expired_keeps_its_children(stage: Stage) -> None:
    with stage.operator():
        stage.space.make_service()
        stage.space.wait_children("qwen")
        stage.proxy.wait_quiet()
        with watches_expired(stage, *WATCHED):
            stage.space.delete("InferenceService", "qwen")
            wait_until("nothing is left", lambda: not stage.space.children("qwen"), 60)
            uid = stage.space.make_service()["metadata"]["uid"]
        stage.space.wait_children("qwen")
        stage.proxy.wait_quiet(2)
        found = [stage.space.need(kind, name)["metadata"] for kind, name in stage.space.children("qwen")]
        assert {metadata["ownerReferences"][0]["uid"] for metadata in found} == {uid}
        stage.space.edit("qwen", drain={"timeoutSeconds": 9})
        stage.proxy.wait_quiet(2)
        after = [stage.space.need(kind, name)["metadata"]["uid"] for kind, name in stage.space.children("qwen")]
        assert {metadata["uid"] for metadata in found} <= set(after)


def test_an_idle_operator_lists_only_when_a_watch_expired(stage: Stage) -> None:
    with stage.operator():
        stage.space.make_service()
        stage.space.wait_children("qwen")
        stage.proxy.wait_quiet(2)
        before = len(lists(stage))
        stage.proxy.sever()
        stage.proxy.severed = False
        stage.proxy.wait_quiet(2)
        assert len(lists(stage)) == before, "a watch that is resumed needs no list"
        with watches_expired(stage, POD):
            pass
        stage.proxy.wait_quiet(2)
        assert len(lists(stage)) == before + 2, "Kopf's, and ours"


def lists(stage: Stage) -> list[Call]:
    return [call for call in stage.proxy.calls if call.verb == "list" and call.namespace == stage.space.namespace]


def test_a_list_that_fails_is_asked_for_again(stage: Stage) -> None:
    asked = 0

    def second_list(call: Call) -> bool:
        """The first is Kopf's."""
        nonlocal asked
        asked += (call.verb, call.resource) == ("list", AUTOSCALER.plural)
        return asked == 2 and call.verb == "list"

    with stage.operator():
        stage.space.make_service(autoscaling=AUTOSCALING)
        wait_until("the HPA", lambda: stage.space.get("HorizontalPodAutoscaler", "qwen-engine"))
        stage.proxy.wait_quiet()
        fault = stage.proxy.fail(second_list, 500)
        with watches_expired(stage, AUTOSCALER):
            stage.space.delete("HorizontalPodAutoscaler", "qwen-engine")
        wait_until("the HPA again", lambda: stage.space.get("HorizontalPodAutoscaler", "qwen-engine"))
        assert fault.hits == 1
