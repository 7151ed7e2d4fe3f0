"""Tests who sets the replicas, and how the field is handed over."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.operator.builders import make_deployment, make_resource

from conveyor_api.spec import InferenceServiceSpec
from conveyor_operator.activity.answer import Activity
from conveyor_operator.inferenceservice.observed import DeploymentState
from conveyor_operator.inferenceservice.replicas import Handover, Replicas, plan_hold, plan_replicas, plan_zero

OURS = frozenset({"conveyor"})
HANDED_OVER = frozenset({"conveyor", "conveyor-replicas"})
THE_HPAS = frozenset({"kube-controller-manager"})


def fixed(replicas: int | None = None) -> InferenceServiceSpec:
    return make_resource(**({} if replicas is None else {"replicas": replicas})).spec


def autoscaled(low: int = 1, high: int = 5) -> InferenceServiceSpec:
    return make_resource(autoscaling={"minReplicas": low, "maxReplicas": high}).spec


def live(replicas: int, managers: frozenset[str], **changes: Any) -> DeploymentState:
    return make_deployment(replicas, replicas_managers=managers, **changes)


def test_fixed_replicas_are_those_of_the_spec() -> None:
    assert plan_replicas(fixed(3), None, False) == Replicas(3)
    assert plan_replicas(fixed(3), live(5, OURS), False) == Replicas(3)
    assert plan_hold(fixed(3), live(5, OURS)) is None


def test_a_new_autoscaled_deployment_gets_its_first_number_from_the_second_manager() -> None:
    assert plan_replicas(autoscaled(3), None, False) == Replicas(None)
    assert plan_hold(autoscaled(3), None) is None, "there is nothing to hold before the Deployment is made"
    assert plan_hold(autoscaled(3), live(1, frozenset())) == Handover(3)


def test_a_deployment_that_was_deleted_comes_back_with_the_number_that_the_autoscaler_had_decided() -> None:
    created = live(1, frozenset())
    assert plan_hold(autoscaled(), created, former=2) == Handover(2), "not the number to start with"
    assert plan_hold(autoscaled(), created, former=9) == Handover(5)
    assert plan_hold(autoscaled(2), created, former=1) == Handover(2)


def test_a_number_of_ours_is_held_before_we_let_go_of_it() -> None:
    assert plan_hold(autoscaled(), live(3, OURS)) == Handover(3)
    assert plan_hold(autoscaled(), live(3, HANDED_OVER)) == Handover(3)


def test_an_hpa_starts_from_one_not_from_zero() -> None:
    assert plan_hold(autoscaled(), live(0, OURS)) == Handover(1, force=True)


def test_once_handed_over_the_field_is_left_alone() -> None:
    assert plan_hold(autoscaled(), live(3, THE_HPAS)) is None
    assert plan_hold(autoscaled(), live(3, frozenset({"conveyor-replicas"}))) is None
    assert plan_hold(autoscaled(), live(0, frozenset({"kubectl"}))) is None


def test_the_pods_are_kept_when_the_autoscaler_goes() -> None:
    assert plan_replicas(fixed(), live(4, THE_HPAS), True) == Replicas(4, "4")
    assert plan_replicas(fixed(), live(4, THE_HPAS), False) == Replicas(4, "4"), "also after a restart in between"


def test_they_are_not_kept_where_the_spec_names_a_number_nor_if_there_are_none() -> None:
    assert plan_replicas(fixed(3), live(5, THE_HPAS), True) == Replicas(3)
    assert plan_replicas(fixed(), live(0, THE_HPAS), True) == Replicas(1)


def test_a_held_number_stays_until_the_spec_names_one() -> None:
    held = live(4, OURS, held_replicas="4")
    assert plan_replicas(fixed(), held, False) == Replicas(4, "4")
    assert plan_replicas(fixed(2), held, False) == Replicas(2)


def test_somebody_who_scales_the_deployment_by_hand_is_undone() -> None:
    assert plan_replicas(fixed(2), live(7, frozenset({"kubectl"})), False) == Replicas(2)


managers = st.frozensets(st.sampled_from(["conveyor", "conveyor-replicas", "kube-controller-manager", "kubectl"]))


@given(st.integers(0, 1000), managers, st.booleans())
def test_under_an_autoscaler_no_number_is_ever_sent(there: int, owners: frozenset[str], seen: bool) -> None:
    assert plan_replicas(autoscaled(), live(there, owners), seen).count is None


@given(st.integers(1, 1000), st.integers(1, 1000), managers)
def test_a_hold_never_takes_a_running_pod_away(low: int, there: int, owners: frozenset[str]) -> None:
    hold = plan_hold(autoscaled(low, 1000), live(there, owners))
    if hold is not None and owners:
        assert hold == Handover(there)


FROM_ZERO, TO_ZERO = Handover(1, force=True), Handover(0, force=True)
BY_US = frozenset({"conveyor-replicas"})


def test_requests_that_wait_start_one_engine() -> None:
    assert plan_zero(autoscaled(0), live(0, BY_US), Activity.WAITING) == FROM_ZERO
    assert plan_zero(autoscaled(0), live(0, frozenset({"kubectl"})), Activity.WAITING) == FROM_ZERO
    for activity in (Activity.STEADY, Activity.IDLE):
        assert plan_zero(autoscaled(0), live(0, BY_US), activity) is None
    assert plan_zero(autoscaled(0), live(1, BY_US, available_replicas=0), Activity.WAITING) is None, "it is on its way"


def test_the_engines_of_a_service_without_requests_go() -> None:
    for count in (1, 3):
        assert plan_zero(autoscaled(0), live(count, THE_HPAS), Activity.IDLE) == TO_ZERO
    for activity in (Activity.STEADY, Activity.WAITING):
        assert plan_zero(autoscaled(0), live(1, THE_HPAS), activity) is None


def test_engines_that_start_or_fail_or_are_replaced_stay() -> None:
    for changes in ({"available_replicas": 1}, {"updated_replicas": 1}, {"observed_generation": 0}):
        assert plan_zero(autoscaled(0), live(2, THE_HPAS, **changes), Activity.IDLE) is None


def test_only_a_minimum_of_zero_lets_engines_go() -> None:
    for spec in (autoscaled(1), fixed(), fixed(1)):
        assert plan_zero(spec, live(1, THE_HPAS), Activity.IDLE) is None
    assert plan_zero(fixed(0), live(0, OURS), Activity.WAITING) is None
    assert plan_zero(autoscaled(0), None, Activity.WAITING) is None


def test_a_raised_minimum_wakes_what_slept_and_nothing_that_a_person_has_stopped() -> None:
    assert plan_zero(autoscaled(2), live(0, BY_US), Activity.STEADY) == Handover(2, force=True)
    assert plan_zero(autoscaled(2), live(0, frozenset({"kubectl"})), Activity.STEADY) is None


def test_a_service_that_may_go_to_zero_begins_with_one() -> None:
    assert plan_hold(autoscaled(0), live(1, frozenset())) == Handover(1)
    assert plan_hold(autoscaled(0), live(1, frozenset()), former=0) == Handover(1)
