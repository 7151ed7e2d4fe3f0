"""Compares how GitOps tools judge a service: the health check for Argo CD in docs/gitops.md, and the kstatus library.

Both get conditions that the operator computes, for each state that docs/gitops.md distinguishes.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import yaml
from lupa.lua51 import LuaRuntime
from tests.operator.builders import NOW, ROLLING_OUT, ended, make_deployment, make_pod
from tests.operator.inferenceservice.test_conditions import (
    FETCHING,
    LOADING,
    READY,
    REFUSED,
    judge,
    make_situation,
)

from conveyor_api.conditions import ConditionType, Reason
from conveyor_api.crd import build_schema
from conveyor_api.names import API_VERSION, GROUP, KIND
from conveyor_operator.inferenceservice.conditions import Judged, judge_all
from conveyor_operator.inferenceservice.observed import RolledBack
from conveyor_operator.inferenceservice.pods import ContainerState
from conveyor_operator.inferenceservice.situation import Former
from conveyor_operator.inferenceservice.status import build_invalid_status
from e2e import kstatus
from e2e.cluster.paths import REPOSITORY

KEY = f"resource.customizations.health.{GROUP}_{KIND}"


def read_check() -> str:
    page = (REPOSITORY / "docs/gitops.md").read_text()
    (example,) = [text.split("```")[0] for text in page.split("```yaml\n")[1:] if KEY in text.split("```")[0]]
    check: str = yaml.safe_load(example)["data"][KEY]
    return check


def check_health(body: dict[str, Any]) -> tuple[str, str]:
    """Return status and message of the service's health. Argo CD runs such checks with Lua 5.1, without libraries."""
    lua = LuaRuntime()
    run = lua.eval(f"function(obj) {read_check()} end")
    found = run(lua.table_from(body, recursive=True))
    return found["status"], found["message"]


class State(NamedTuple):
    """What the operator wrote about a service, and how tools have to judge it."""

    name: str
    status: dict[str, Any]
    kstatus: str
    argo: str
    spec: dict[str, Any] = {}  # noqa: RUF012 (never changed)


def build(conditions: dict[str, Judged], observed: int = 2) -> dict[str, Any]:
    listed = [
        {"type": each.type.value, "status": each.status, "reason": str(each.reason), "message": each.message}
        for each in conditions.values()
    ]
    return {"observedGeneration": observed, "conditions": listed}


def judge_further(*pods: Any, **facts: Any) -> dict[str, Any]:
    """Return the status of a service whose first engine starts, with other facts of its situation."""
    situation = replace(make_situation(NOT_READY, *pods, **SLEEPY), **facts)
    return build({each.type: each for each in judge_all(situation)})


NOT_READY = make_deployment(1, ready_replicas=0, available_replicas=0, conditions=ROLLING_OUT)
LATE = replace(NOT_READY, conditions={"Progressing": ("False", "ProgressDeadlineExceeded", "timed out")})
LOST = make_deployment(1, ready_replicas=0, available_replicas=0)
ROLLING = make_deployment(1, replicas=2, updated_replicas=1, revision=2, conditions=ROLLING_OUT)
NO_PODS = replace(NOT_READY, replicas=0, updated_replicas=0)
FAILED = make_pod("new", ContainerState("engine", waiting_reason="ErrImagePull", waiting_message="no such image"))
CRASHED = make_pod("broken", ended("boom"))
KILLED = make_pod("broken", ended(code=137, reason="OOMKilled"))
NO_GPU = make_pod(unschedulable="0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
SLEEPY = {"autoscaling": {"minReplicas": 0, "maxReplicas": 4}}
SPARE = replace(LOADING, name="other")
UNSEEN = build_schema()["properties"]["status"]["default"]
ONE_OF_THREE, TWO_OF_THREE = (make_deployment(3, ready_replicas=n, available_replicas=n) for n in (1, 2))
IS_READY = judge(make_deployment(1), READY, endpoints=1)
SCALING = judge(ONE_OF_THREE, READY, SPARE, endpoints=1, was_whole=True)
FROM_ZERO = Former(answered_from_zero=True)
RESTORED = RolledBack("attempt", Reason.IMAGE_PULL_FAILED, "no such image")
WRONG = build_invalid_status("spec.batching.mode: unknown", 2, {}, NOW)

STATES = [
    State("not seen by an operator", UNSEEN, "InProgress", "Progressing"),
    State("edited, the edit not seen", build(IS_READY, observed=1), "InProgress", "Progressing"),
    State("new, no Deployment yet", build(judge(None)), "InProgress", "Progressing"),
    State("new, the model is downloading", build(judge(NOT_READY, FETCHING)), "InProgress", "Progressing"),
    State("new, the model is loading", build(judge(NOT_READY, LOADING)), "InProgress", "Progressing"),
    State("new, no such image", build(judge(NOT_READY, FAILED)), "Failed", "Degraded"),
    State("new, no GPU", build(judge(NOT_READY, NO_GPU)), "InProgress", "Progressing"),
    State("new, no GPU for too long", build(judge(LATE, NO_GPU)), "Failed", "Degraded"),
    State("new, pods refused by a quota", build(judge(NO_PODS, refused="exceeded quota")), "Failed", "Degraded"),
    State("new, a child refused", build(judge(None, obstacles=(REFUSED,))), "Failed", "Degraded"),
    State("ready", build(IS_READY), "Current", "Healthy"),
    State("its only engine crashes", build(judge(LOST, CRASHED)), "InProgress", "Progressing"),
    State("its only pod finds no GPU", build(judge(LOST, NO_GPU)), "InProgress", "Progressing"),
    State("the image of its only pod is gone", build(judge(LOST, FAILED)), "Failed", "Degraded"),
    State("one of three engines lost", build(judge(TWO_OF_THREE, READY, KILLED, endpoints=2)), "Current", "Healthy"),
    State("scaling from 1 to 3", build(SCALING), "Current", "Healthy"),
    State("a rollout, the old one answers", build(judge(ROLLING, LOADING, endpoints=1)), "InProgress", "Progressing"),
    State("a failed rollout, the old engine answers", build(judge(ROLLING, FAILED, endpoints=1)), "Failed", "Degraded"),
    State("former pods restored", judge_further(READY, rolled_back=RESTORED), "Failed", "Degraded"),
    State("replicas: 0", build(judge(make_deployment(0), replicas=0)), "Current", "Suspended", {"replicas": 0}),
    State("at zero", build(judge(make_deployment(0), **SLEEPY)), "Current", "Healthy"),
    State("the first start from zero", judge_further(LOADING, former=FROM_ZERO), "InProgress", "Progressing"),
    State("a spec that no program can read", WRONG, "Failed", "Degraded"),
]  # fmt: skip


def build_body(state: State) -> dict[str, Any]:
    metadata = {"name": "qwen", "namespace": "team-a", "generation": 2}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": state.spec, "status": state.status}


@pytest.mark.slow  # builds the library once: 40 s of a core
def test_argo_cd_and_kstatus_judge_each_state_alike() -> None:
    found = kstatus.compute([build_body(state) for state in STATES])
    assert {state.name: word for state, word in zip(STATES, found, strict=True)} == {s.name: s.kstatus for s in STATES}


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
def test_argo_cd_shows_each_state(state: State) -> None:
    health, message = check_health(build_body(state))
    assert health == state.argo, message
    assert message


@pytest.mark.parametrize("state", STATES[2:], ids=lambda state: state.name)
def test_a_service_that_is_not_current_says_whether_waiting_helps(state: State) -> None:
    conditions = {each["type"]: each["status"] for each in state.status["conditions"]}
    abnormal = {type: status for type, status in conditions.items() if type in ("Reconciling", "Stalled")}
    expected = {"InProgress": {"Reconciling": "True"}, "Failed": {"Stalled": "True"}, "Current": {}}
    assert abnormal == expected[state.kstatus]
    assert (state.kstatus == "Current") <= (conditions["Ready"] == "True")


def test_a_failed_rollout_is_stalled_with_its_cause_though_old_engines_answer() -> None:
    conditions = judge(ROLLING, FAILED, endpoints=1)
    assert conditions["Ready"].status == "True"
    stalled = conditions[ConditionType.STALLED]
    assert (stalled.reason, stalled.message) == ("ImagePullFailed", "image cannot be pulled: no such image (pod new)")


def test_a_status_that_is_absent_or_without_conditions_is_no_judgement() -> None:
    for status in (None, {}, {"observedGeneration": 2}, {"observedGeneration": 2, "conditions": []}):
        body = build_body(STATES[0]) | {"status": status}
        assert check_health({key: value for key, value in body.items() if value is not None})[0] == "Progressing"
