"""Tests the next steps and their order: applies, holds and deletes."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.operator.builders import OWNER, build, desire, make_child, make_deployment, make_observed, make_pod

from conveyor_operator.activity.answer import Activity
from conveyor_operator.inferenceservice.differences import find_differences
from conveyor_operator.inferenceservice.memory import ServiceMemory
from conveyor_operator.inferenceservice.observed import Observed
from conveyor_operator.inferenceservice.plan import plan
from conveyor_operator.loop.child import ChildId, hash_of, id_of
from conveyor_operator.loop.steps import Applied, Apply, Delete, Hold, Obstacle, Reason, RequeueAt, Step

AUTOSCALING = {"maxReplicas": 4}
DEPLOYMENT = ("Deployment", "qwen-engine")
NOW = datetime(2026, 11, 22, 8, 0, tzinfo=UTC)
OURS, HPAS = frozenset({"conveyor"}), frozenset({"kube-controller-manager"})


def remember(before: dict[str, Any] | None = None, **changes: Any) -> ServiceMemory:
    """Return the memory of a service after all desired children of the spec `before` have been applied."""
    bodies = [_with_replicas(body, before) for body in desire(**before).children] if before is not None else []
    applied = {id_of(body): Applied(hash_of(body), "as-applied") for body in bodies}
    return ServiceMemory(OWNER.uid, applied=applied, **changes)


def _with_replicas(body: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    fixed = body["kind"] == "Deployment" and "autoscaling" not in spec
    return {**body, "spec": {"replicas": spec.get("replicas", 1), **body["spec"]}} if fixed else body


def all_there(spec: dict[str, Any], desired: int = 1, managers: frozenset[str] = OURS, **changes: Any) -> Observed:
    children = [make_child(kind, name, **changes) for kind, name in build(**spec)]
    children = [replace(child, replicas=desired) if child.kind == "Deployment" else child for child in children]
    return make_observed(*children, deployment=make_deployment(desired, replicas_managers=managers))


def next_steps(
    observed: Observed, memory: ServiceMemory, activity: Activity = Activity.STEADY, **spec: Any
) -> list[Step]:
    return plan(desire(**spec), observed, memory, activity, NOW)


def live_through(observed: Observed, memory: ServiceMemory, **spec: Any) -> list[list[Step]]:
    """Return all rounds of steps, each executed by an API server that accepts everything."""
    rounds = []
    while steps := next_steps(observed, memory, **spec):
        rounds.append(steps)
        for step in steps:
            if isinstance(step, RequeueAt):
                return rounds
            memory.done.append(step)
            match step:
                case Apply():
                    body = {**step.body, "metadata": {**step.body["metadata"], "uid": "made"}}
                    observed = observed.with_child(body)
                    memory.applied[step.id] = Applied(hash_of(step.body), observed.children[step.id].fingerprint)
                case Hold():
                    assert observed.deployment is not None
                    held = replace(observed.deployment, requested_replicas=step.count, replicas_managers=HPAS)
                    observed = replace(observed, deployment=held)
                case Delete():
                    observed = observed.without_child(step.id)
    return rounds


def ids(steps: list[Step]) -> list[ChildId]:
    return [step.id for step in steps if not isinstance(step, RequeueAt)]


def reasons(steps: list[Step]) -> dict[str, str]:
    return {step.id[0]: step.reason for step in steps if isinstance(step, Apply)}


def test_missing_children_are_applied_the_pods_needs_before_the_pods_and_what_counts_them_after() -> None:
    rounds = live_through(Observed(), remember(), autoscaling=AUTOSCALING)
    assert [[kind for kind, _ in ids(steps)] for steps in rounds] == [
        ["ServiceAccount", "ConfigMap", "Service", "Service", "NetworkPolicy"],
        ["Deployment"],
        ["Deployment"],
        ["PodDisruptionBudget", "HorizontalPodAutoscaler"],
    ]
    assert isinstance(rounds[2][0], Hold), "its first number"
    assert {step.reason for steps in rounds for step in steps if isinstance(step, Apply)} == {"created"}


def test_children_that_are_as_we_left_them_need_nothing() -> None:
    assert next_steps(all_there({}), remember({})) == []


def test_a_new_process_looks_at_every_child_once() -> None:
    rounds = live_through(all_there({}), remember())
    applies = [step for steps in rounds for step in steps if isinstance(step, Apply)]
    assert {apply.reason for apply in applies} == {"checked"}
    assert sorted(apply.id for apply in applies) == sorted(build())


def test_a_touched_child_is_applied_again() -> None:
    observed = all_there({})
    touched = make_child("Service", "qwen", fingerprint="touched")
    observed = replace(observed, children={**observed.children, ("Service", "qwen"): touched})
    steps = next_steps(observed, remember({}))
    assert (ids(steps), reasons(steps)) == ([("Service", "qwen")], {"Service": "drifted"})


def test_a_changed_spec_applies_what_it_changed_the_configuration_first() -> None:
    rounds = live_through(all_there({}), remember({}), drain={"timeout": "7s"})
    assert [reasons(steps) for steps in rounds[:2]] == [{"ConfigMap": "created"}, {"Deployment": "changed"}]


def test_replicas_that_somebody_changed_are_applied_again() -> None:
    assert reasons(next_steps(all_there({}, desired=5), remember({}))) == {"Deployment": "drifted"}


def test_a_child_that_a_webhook_alters_each_time_is_applied_once_in_a_reconcile() -> None:
    memory = remember({})
    (step,) = next_steps(all_there({}, desired=5), memory)
    memory.done.append(step)
    assert next_steps(all_there({}, desired=5), memory) == []


def test_an_object_of_somebody_else_is_left_alone_and_looked_at_again_later() -> None:
    theirs = make_child("Service", "qwen", controller="", controller_uid="", labels={})
    observed = all_there({})
    observed = replace(observed, children={**observed.children, theirs_id(theirs): theirs})
    memory = remember({})
    (obstacle,) = find_differences(desire(), observed, memory).obstacles
    assert (obstacle.kind, obstacle.name, obstacle.reason) == ("Service", "qwen", Reason.CHILD_NOT_OWNED)
    assert not obstacle.temporary
    assert next_steps(observed, memory) == [RequeueAt(NOW + timedelta(seconds=0.25))]
    for waited, again in ((8, 8), (3600, 60)):
        memory.waiting_since = NOW - timedelta(seconds=waited)
        assert next_steps(observed, memory) == [RequeueAt(NOW + timedelta(seconds=again))], "less and less often"


def theirs_id(child: Any) -> ChildId:
    return child.kind, child.name


def test_a_failed_call_is_neither_retried_in_the_same_reconcile_nor_scheduled() -> None:
    observed = all_there({})
    left = {id: child for id, child in observed.children.items() if id != ("Service", "qwen")}
    memory = remember({})
    memory.refused[("Service", "qwen")] = Obstacle("Service", "qwen", Reason.CHILD_REFUSED, "no")
    assert next_steps(replace(observed, children=left), memory) == []


def test_a_child_of_the_former_service_of_this_name_is_waited_for() -> None:
    observed = make_observed(make_child(controller_uid="uid-0"))
    (obstacle,) = find_differences(desire(), observed, remember()).obstacles
    assert obstacle.temporary


def test_a_child_of_another_group_s_inferenceservice_is_somebody_else_s() -> None:
    theirs = make_child("Service", "qwen", controller_group="serving.kserve.io", controller_uid="uid-of-theirs")
    observed = all_there({})
    observed = replace(observed, children={**observed.children, theirs_id(theirs): theirs})
    (obstacle,) = find_differences(desire(), observed, remember({})).obstacles
    assert not obstacle.temporary
    assert "belongs to InferenceService/qwen of serving.kserve.io. Delete it" in obstacle.message


def test_an_orphan_with_all_our_labels_is_taken_back() -> None:
    observed = make_observed(make_child(controller="", controller_uid=""))
    assert find_differences(desire(), observed, remember()).obstacles == ()


def test_the_deployment_waits_for_what_its_pods_need_and_what_counts_pods_does_not() -> None:
    for kind in ("ServiceAccount", "ConfigMap"):
        observed, memory = all_there({}), remember()
        id = next(id for id in observed.children if id[0] == kind)
        memory.refused[id] = Obstacle(*id, Reason.CHILD_REFUSED, "no")
        rounds = live_through(observed, memory)
        applied = {kind for steps in rounds for kind, _ in ids(steps)}
        assert "Deployment" not in applied
        assert "PodDisruptionBudget" in applied


def test_an_unwanted_autoscaler_goes_before_anything_is_applied() -> None:
    observed = all_there({"autoscaling": AUTOSCALING}, 3, HPAS)
    hpa = observed.children["HorizontalPodAutoscaler", "qwen-engine"]
    memory = remember({"autoscaling": AUTOSCALING}, had_autoscaler=True)
    rounds = live_through(observed, memory)
    assert rounds[0] == [Delete((hpa.kind, hpa.name), hpa.uid)]
    (apply,) = rounds[1]
    assert isinstance(apply, Apply)
    assert apply.body["spec"]["replicas"] == 3, "the live number is held"


def test_the_number_of_replicas_is_held_before_the_apply_that_lets_go_of_it() -> None:
    before = remember({"replicas": 3}, former_replicas=3)
    rounds = live_through(all_there({}, desired=3), before, autoscaling=AUTOSCALING)
    hold, apply = rounds[0]
    assert hold == Hold(DEPLOYMENT, 3)
    assert isinstance(apply, Apply)
    assert "replicas" not in apply.body["spec"]
    assert ids(rounds[1]) == [("HorizontalPodAutoscaler", "qwen-engine")]


def test_a_number_that_was_not_held_when_the_deployment_was_made_is_held_in_the_next_reconcile() -> None:
    """The operator or this call has failed in between."""
    spec: dict[str, Any] = {"autoscaling": AUTOSCALING | {"minReplicas": 2}}
    assert next_steps(all_there(spec, 1, frozenset()), remember(spec), **spec) == [Hold(DEPLOYMENT, 2)]


SLEEPY: dict[str, Any] = {"autoscaling": AUTOSCALING | {"minReplicas": 0}}


def test_waiting_requests_wake_a_service_once_in_a_reconcile() -> None:
    observed, memory = all_there(SLEEPY, 0, HPAS), remember(SLEEPY)
    (hold,) = next_steps(observed, memory, Activity.WAITING, **SLEEPY)
    assert hold == Hold(DEPLOYMENT, 1, force=True)
    memory.done.append(hold)
    assert next_steps(observed, memory, Activity.WAITING, **SLEEPY) == [], "as if somebody put it back each time"


def test_an_idle_service_loses_its_engines_when_everything_else_is_done() -> None:
    observed = all_there(SLEEPY, 2, HPAS)
    assert next_steps(observed, remember(SLEEPY), Activity.IDLE, **SLEEPY) == [Hold(DEPLOYMENT, 0, force=True)]
    assert Hold not in {type(step) for step in next_steps(observed, remember(), Activity.IDLE, **SLEEPY)}


def test_a_deployment_of_somebody_else_is_not_woken() -> None:
    theirs = make_child(labels={}, controller="", controller_uid="")
    observed = all_there(SLEEPY, 0, HPAS)
    observed = replace(observed, children={**observed.children, DEPLOYMENT: theirs})
    steps = next_steps(observed, remember(SLEEPY), Activity.WAITING, **SLEEPY)
    assert not any(isinstance(step, Hold) for step in steps)


def test_a_deployment_of_somebody_else_is_neither_scaled_nor_held() -> None:
    theirs = make_child(labels={}, controller="", controller_uid="")
    observed = make_observed(theirs, deployment=make_deployment(1, replicas_managers=frozenset()))
    rounds = live_through(observed, remember(), autoscaling=AUTOSCALING)
    done = [id for steps in rounds for id in ids(steps)]
    assert DEPLOYMENT not in done
    assert ("HorizontalPodAutoscaler", "qwen-engine") not in done


def test_somebody_elses_autoscaler_stays() -> None:
    observed = all_there({})
    hpa = make_child("HorizontalPodAutoscaler", controller="", controller_uid="")
    observed = replace(observed, children={**observed.children, theirs_id(hpa): hpa})
    assert next_steps(observed, remember({})) == []


def test_what_keda_has_made_goes_with_the_scaled_object_and_before_anything_is_applied() -> None:
    by_keda = {"autoscaling": AUTOSCALING | {"provider": "KEDA"}}
    observed, memory = all_there(by_keda, 3, HPAS), remember(by_keda, had_autoscaler=True)
    kedas = make_child("HorizontalPodAutoscaler", controller="ScaledObject/qwen-engine", controller_uid="uid-2")
    observed = replace(observed, children={**observed.children, (kedas.kind, kedas.name): kedas})
    assert next_steps(observed, memory, **by_keda) == []
    rounds = live_through(observed, memory, autoscaling=AUTOSCALING)
    removed = [("ScaledObject", "qwen-engine"), ("HorizontalPodAutoscaler", "qwen-engine")]
    assert [ids(steps) for steps in rounds] == [removed, removed[1:]]
    assert isinstance(rounds[1][0], Apply)


OLD = make_child("ConfigMap", "qwen-engine-00000000")
OLD_CLAIM = make_child("PersistentVolumeClaim", "qwen-models")


def removed(**changes: Any) -> list[str]:
    observed = all_there({})
    old = {(child.kind, child.name): child for child in (OLD, OLD_CLAIM)}
    observed = replace(observed, children={**observed.children, **old}, **changes)
    if observed.deployment is not None and not observed.deployment.template_hash:
        live = replace(observed.deployment, template_hash=desire().template_hash)
        observed = replace(observed, deployment=live)
    return [step.id[1] for step in next_steps(observed, remember({})) if isinstance(step, Delete)]


def test_an_old_configuration_and_claim_go_when_the_rollout_is_done() -> None:
    assert removed(deployment=make_deployment(1)) == [OLD.name, OLD_CLAIM.name]


def test_they_stay_while_the_rollout_goes_on() -> None:
    assert removed(deployment=None) == []
    assert removed(deployment=make_deployment(1, updated_replicas=0)) == []
    assert removed(deployment=make_deployment(1, available_replicas=0)) == []
    assert removed(deployment=make_deployment(1, observed_generation=0)) == []
    assert removed(deployment=make_deployment(1, template_hash="old")) == [], "its pods use them"


def test_a_configuration_stays_while_a_pod_has_it() -> None:
    assert removed(pods=(make_pod(config_hash="00000000", leaving=True),)) == [OLD_CLAIM.name]


def test_the_configuration_that_the_deployment_names_stays() -> None:
    assert removed(deployment=make_deployment(1, config_hash="00000000")) == [OLD_CLAIM.name]


def test_nothing_is_removed_while_something_is_in_the_way() -> None:
    observed, memory = all_there({}), remember({})
    observed = replace(observed, children={**observed.children, (OLD.kind, OLD.name): OLD})
    memory.refused[("Service", "qwen")] = Obstacle("Service", "qwen", Reason.CHILD_REFUSED, "no")
    assert next_steps(observed, memory) == []


@given(st.sets(st.sampled_from(sorted(build(autoscaling=AUTOSCALING)))), st.booleans())
def test_it_comes_to_an_end_with_everything_applied_that_is_not_in_the_way(there: set[ChildId], ours: bool) -> None:
    changes: dict[str, Any] = {} if ours else {"controller": "Other/other", "controller_uid": "x"}
    observed = Observed(children={(kind, name): make_child(kind, name, **changes) for kind, name in there})
    desired, memory = build(autoscaling=AUTOSCALING), remember()
    blocked = set() if ours else there
    rounds = live_through(observed, memory, autoscaling=AUTOSCALING)
    applied = [step.id for steps in rounds for step in steps if isinstance(step, Apply)]
    waits = {"ServiceAccount", "ConfigMap"} & {kind for kind, _ in blocked}
    left_out = blocked | ({DEPLOYMENT} if waits else set())
    left_out |= {("HorizontalPodAutoscaler", "qwen-engine")} if DEPLOYMENT in blocked else set()
    assert sorted(applied) == sorted(desired.keys() - left_out), "each once"
    assert isinstance(rounds[-1][-1], RequeueAt) == bool(blocked)
