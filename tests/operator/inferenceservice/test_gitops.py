"""Runs the health check for Argo CD in docs/gitops.md on conditions that the operator computes."""

from typing import Any

import pytest
import yaml
from lupa.lua51 import LuaRuntime
from tests.operator.builders import ROLLING_OUT, make_deployment, make_pod
from tests.operator.inferenceservice.test_conditions import LOADING, READY, judge

from conveyor_api.names import GROUP, KIND
from conveyor_operator.inferenceservice.conditions import Judged
from conveyor_operator.inferenceservice.pods import ContainerState
from e2e.cluster.paths import REPOSITORY

KEY = f"resource.customizations.health.{GROUP}_{KIND}"


def read_check() -> str:
    page = (REPOSITORY / "docs/gitops.md").read_text()
    (example,) = [text.split("```")[0] for text in page.split("```yaml\n")[1:] if KEY in text.split("```")[0]]
    check: str = yaml.safe_load(example)["data"][KEY]
    return check


def check_health(status: dict[str, Any] | None, generation: int = 2) -> tuple[str, str]:
    """Return status and message of the service's health. Argo CD runs such checks with Lua 5.1, without libraries."""
    lua = LuaRuntime()
    body: dict[str, Any] = {"metadata": {"generation": generation}} | ({} if status is None else {"status": status})
    run = lua.eval(f"function(obj) {read_check()} end")
    found = run(lua.table_from(body, recursive=True))
    return found["status"], found["message"]


def build_status(conditions: dict[str, Judged], observed: int = 2) -> dict[str, Any]:
    listed = [
        {"type": each.type.value, "status": each.status, "reason": str(each.reason), "message": each.message}
        for each in conditions.values()
    ]
    return {"observedGeneration": observed, "conditions": listed}


FAILED = make_pod("new", ContainerState("engine", waiting_reason="ErrImagePull", waiting_message="no such image"))
ROLLING = make_deployment(1, replicas=2, updated_replicas=1, revision=2, conditions=ROLLING_OUT)
NOT_READY = make_deployment(1, ready_replicas=0, available_replicas=0)


@pytest.mark.parametrize(
    ("conditions", "health"),
    [
        (judge(make_deployment(1), READY, endpoints=1), "Healthy"),
        (judge(make_deployment(3, ready_replicas=1, available_replicas=1), READY, endpoints=1), "Healthy"),
        (judge(None), "Progressing"),
        (judge(NOT_READY, LOADING), "Progressing"),
        (judge(ROLLING, LOADING, endpoints=1), "Progressing"),
        (judge(ROLLING, FAILED, endpoints=1), "Degraded"),
        (judge(NOT_READY, FAILED), "Degraded"),
        (judge(make_deployment(0), replicas=0), "Suspended"),
    ],
)
def test_the_health_of_a_service_is_that_of_its_rollout_and_its_engines(
    conditions: dict[str, Judged], health: str
) -> None:
    found, message = check_health(build_status(conditions))
    assert found == health, (message, {type: (each.status, each.reason) for type, each in conditions.items()})
    assert message


def test_a_failed_rollout_is_degraded_though_old_engines_answer() -> None:
    conditions = judge(ROLLING, FAILED, endpoints=1)
    assert conditions["Ready"].status == "True"
    found, message = check_health(build_status(conditions))
    assert found == "Degraded"
    assert message.startswith("ImagePullFailed: 1 of 1 engines are ready; image ")


def test_a_status_that_is_absent_or_of_an_older_spec_is_no_judgement() -> None:
    healthy = build_status(judge(make_deployment(1), READY, endpoints=1), observed=1)
    for status in (None, {}, healthy, {"observedGeneration": 2}, {"observedGeneration": 2, "conditions": []}):
        assert check_health(status)[0] == "Progressing"
