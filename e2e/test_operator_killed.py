"""The operator is killed in the middle of a rollout: serving goes on, and the next operator continues the work."""

import asyncio

from e2e import kube
from e2e.gateway import service_url
from e2e.load import running_load
from e2e.services import service

BODY = {"model": "roll", "max_tokens": 80, "min_tokens": 40, "temperature": 0.8}


async def test_an_operator_killed_in_a_rollout_loses_nothing(namespace: str) -> None:
    spec = {"rollout": {"maxSurge": 1, "maxUnavailable": 0}}
    kube.apply(service("roll", replicas=2, **spec), namespace)
    kube.wait_ready("roll", namespace)
    async with running_load(service_url("roll", namespace), BODY, concurrency=2) as load:
        spec["kvCache"] = {"blockBudget": 160}
        kube.apply(service("roll", replicas=2, **spec), namespace)
        await asyncio.sleep(0.3)
        assert "deleted" in kube.kubectl(
            "delete", "pod", "-n", kube.SYSTEM_NAMESPACE, "-l", "app.kubernetes.io/name=conveyor-operator",
            "--grace-period=0", "--force",
        )  # fmt: skip
        await asyncio.to_thread(kube.wait_until, "the rollout is done", lambda: settled(2, namespace), 300)
    assert load.answers
    assert not load.failed, [a.error for a in load.failed]
    # The Deployment's controller may have finished the rollout alone. What follows needs an operator.
    kube.kubectl("rollout", "status", "deployment/conveyor-operator", "-n", kube.SYSTEM_NAMESPACE, "--timeout=120s")
    kube.apply(service("roll", replicas=1, **spec), namespace)
    kube.wait_until("a new operator has done it", lambda: settled(1, namespace))
    kube.wait_ready("roll", namespace)


def settled(replicas: int, namespace: str) -> bool:
    found = kube.get("infsvc", "roll", namespace)
    deployment = kube.get("deployment", "roll-engine", namespace)
    assert found is not None
    assert deployment is not None
    if (found.get("status") or {}).get("observedGeneration") != found["metadata"]["generation"]:
        return False
    if kube.condition(found, "Progressing").get("status") != "False":
        return False
    status = deployment["status"]
    return status.get("updatedReplicas") == status.get("readyReplicas") == status.get("replicas") == replicas
