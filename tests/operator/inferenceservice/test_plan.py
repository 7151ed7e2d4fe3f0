"""Which applies, which deletes, and in which order."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.operator.builders import OWNER, build, make_child, make_deployment, make_observed, make_pod

from conveyor_operator.inferenceservice.observed import Observed, hash_of
from conveyor_operator.inferenceservice.plan import (
    Applied,
    ChildId,
    Delete,
    plan_applies,
    plan_early_removals,
    plan_removals,
    without_aimless_autoscaler,
)

AUTOSCALING = {"maxReplicas": 4}


def as_applied(desired: dict[ChildId, Any]) -> dict[ChildId, Applied]:
    return {id: Applied(hash_of(body), "as-applied") for id, body in desired.items()}


def all_there(desired: dict[ChildId, Any], **changes: Any) -> Any:
    return make_observed(*(make_child(kind, name, **changes) for kind, name in desired))


def test_missing_children_are_applied_the_pods_needs_before_the_pods() -> None:
    plan = plan_applies(OWNER, build(autoscaling=AUTOSCALING).values(), Observed(), {})
    kinds = [kind for kind, _ in (apply.id for apply in plan.applies)]
    assert kinds == [
        "ServiceAccount", "ConfigMap", "Service", "Service", "NetworkPolicy", "Deployment", "PodDisruptionBudget",
        "HorizontalPodAutoscaler",
    ]  # fmt: skip
    assert {apply.reason for apply in plan.applies} == {"created"}


def test_children_that_are_as_we_left_them_are_skipped() -> None:
    desired = build()
    plan = plan_applies(OWNER, desired.values(), all_there(desired), as_applied(desired))
    assert plan.applies == ()
    assert plan.obstacles == ()


def test_a_new_process_looks_at_every_child_once() -> None:
    desired = build()
    plan = plan_applies(OWNER, desired.values(), all_there(desired), {})
    assert {apply.reason for apply in plan.applies} == {"checked"}
    assert len(plan.applies) == len(desired)


def test_a_touched_child_is_applied_again() -> None:
    desired = build()
    observed = all_there(desired)
    touched = make_child("Service", "qwen", fingerprint="touched")
    observed = replace(observed, children={**observed.children, ("Service", "qwen"): touched})
    (apply,) = plan_applies(OWNER, desired.values(), observed, as_applied(desired)).applies
    assert (apply.id, apply.reason) == (("Service", "qwen"), "drifted")


def test_a_changed_spec_applies_what_it_changed() -> None:
    before, after = build(), build(drain={"timeoutSeconds": 7})
    applied = as_applied(before)
    plan = plan_applies(OWNER, after.values(), all_there(before), applied)
    assert {apply.id[0]: apply.reason for apply in plan.applies} == {"ConfigMap": "created", "Deployment": "changed"}


def test_replicas_that_somebody_changed_are_applied_again() -> None:
    desired = build()
    id = ("Deployment", "qwen-engine")
    desired[id]["spec"]["replicas"] = 3
    observed = replace(all_there(desired), deployment=make_deployment(5))
    (apply,) = plan_applies(OWNER, desired.values(), observed, as_applied(desired)).applies
    assert (apply.id, apply.reason) == (id, "drifted")


def test_an_object_of_somebody_else_is_an_obstacle() -> None:
    theirs = make_child("Service", "qwen", controller="", controller_uid="", labels={})
    plan = plan_applies(OWNER, build().values(), make_observed(theirs), {})
    (obstacle,) = plan.obstacles
    assert (obstacle.kind, obstacle.name, obstacle.reason) == ("Service", "qwen", "ChildNotOwned")
    assert not obstacle.temporary
    assert ("Service", "qwen") not in [apply.id for apply in plan.applies]


def test_a_child_of_the_former_service_of_this_name_is_waited_for() -> None:
    plan = plan_applies(OWNER, build().values(), make_observed(make_child(controller_uid="uid-0")), {})
    (obstacle,) = plan.obstacles
    assert obstacle.temporary


def test_an_orphan_with_all_our_labels_is_taken_back() -> None:
    plan = plan_applies(OWNER, build().values(), make_observed(make_child(controller="", controller_uid="")), {})
    assert plan.obstacles == ()


def test_an_unwanted_autoscaler_goes_before_anything_is_applied() -> None:
    hpa = make_child("HorizontalPodAutoscaler")
    observed = make_observed(hpa, make_child("ConfigMap", "qwen-engine-00000000"))
    assert plan_early_removals(OWNER, build().values(), observed) == (Delete(hpa.kind, hpa.name, hpa.uid),)
    assert plan_early_removals(OWNER, build(autoscaling=AUTOSCALING).values(), observed) == ()


def test_a_deployment_of_somebody_else_is_not_scaled() -> None:
    desired, ours = list(build(autoscaling=AUTOSCALING).values()), make_observed(make_child())
    theirs = make_observed(make_child(labels={}, controller="", controller_uid=""))
    left = without_aimless_autoscaler(OWNER, desired, theirs)
    assert [b["kind"] for b in desired if b not in left] == ["HorizontalPodAutoscaler"]
    assert without_aimless_autoscaler(OWNER, desired, ours) == desired
    assert without_aimless_autoscaler(OWNER, desired, Observed()) == desired


def test_somebody_elses_autoscaler_stays() -> None:
    hpa = make_child("HorizontalPodAutoscaler", controller="", controller_uid="")
    assert plan_early_removals(OWNER, build().values(), make_observed(hpa)) == ()
    assert plan_removals(OWNER, build().values(), make_observed(hpa, deployment=make_deployment())) == ()


OLD = make_child("ConfigMap", "qwen-engine-00000000")
OLD_CLAIM = make_child("PersistentVolumeClaim", "qwen-models")


def removed(**observed: Any) -> list[str]:
    plan = plan_removals(OWNER, build().values(), make_observed(make_child(), OLD, OLD_CLAIM, **observed))
    return [removal.name for removal in plan]


def test_an_old_configuration_and_claim_go_when_the_rollout_is_done() -> None:
    assert removed(deployment=make_deployment(2)) == [OLD.name, OLD_CLAIM.name]


def test_they_stay_while_the_rollout_goes_on() -> None:
    assert removed() == []
    assert removed(deployment=make_deployment(2, updated_replicas=1)) == []
    assert removed(deployment=make_deployment(2, available_replicas=1)) == []
    assert removed(deployment=make_deployment(2, observed_generation=0)) == []


def test_a_configuration_stays_while_a_pod_has_it() -> None:
    pod = make_pod(config_hash="00000000", leaving=True)
    assert removed(deployment=make_deployment(1), pods=(pod,)) == [OLD_CLAIM.name]


def test_the_configuration_that_the_deployment_names_stays() -> None:
    observed = make_observed(make_child(), OLD, deployment=make_deployment(1, config_hash="00000000"))
    assert plan_removals(OWNER, build().values(), observed) == ()


@given(st.sets(st.sampled_from(sorted(build(autoscaling=AUTOSCALING)))), st.booleans())
def test_applies_and_obstacles_are_exactly_what_is_not_right(there: set[ChildId], ours: bool) -> None:
    desired = build(autoscaling=AUTOSCALING)
    changes: dict[str, Any] = {} if ours else {"controller": "Other/other", "controller_uid": "x"}
    observed = Observed(children={(kind, name): make_child(kind, name, **changes) for kind, name in there})
    plan = plan_applies(OWNER, desired.values(), observed, as_applied(desired))
    assert {apply.id for apply in plan.applies} == desired.keys() - there
    assert {(o.kind, o.name) for o in plan.obstacles} == (set() if ours else there)
    assert plan_removals(OWNER, desired.values(), observed) == ()
