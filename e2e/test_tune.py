"""`kubectl conveyor advise` and `tune` on a whole cluster, on a service that declares its workload.

Both commands reach the engines by `kubectl port-forward` and the API server's proxy.
"""

import asyncio
import json
import re
from typing import Any

import pytest

from conveyor_api.names import INFERENCE_SERVICE_LABEL
from e2e import kube
from e2e.gateway import service_url
from e2e.load import running_load
from e2e.services import service

BODY = {"model": "tuned", "max_tokens": 20, "min_tokens": 20, "temperature": 0.8}
DECLARED = {"inputTokens": {"p50": 16, "p95": 64}, "outputTokens": {"p50": 100, "p95": 400}}
LOAD = ("--input-tokens", "32", "--output-tokens", "8", "--rate", "1,2", "--seconds", "10", "--max-batch-size", "2")


@pytest.mark.nightly
@pytest.mark.long
async def test_a_service_is_advised_and_tuned_and_is_afterwards_as_it_was(namespace: str) -> None:
    kube.apply(service("tuned", workload=DECLARED, kvCache={}), namespace)
    kube.wait_ready("tuned", namespace)
    check_sizes(namespace)
    async with running_load(service_url("tuned", namespace), BODY, concurrency=4) as load:
        await asyncio.to_thread(kube.wait_until, "answers", lambda: len(load.answers) > 110, 240)
    advice = json.loads(kube.kubectl("conveyor", "advise", "tuned", "-n", namespace, "-o", "json"))
    assert advice["mode"] == "Continuous"
    assert advice["traffic"]["requests"] > 100
    lengths = advice["patch"]["spec"]["workload"]["outputTokens"]
    assert 16 <= lengths["p50"] <= 32, "the bucket that has the 20 tokens of each answer"
    before = spec_of(namespace)
    for replica in ((), ("--replica",)):
        result = await asyncio.to_thread(tune, namespace, *replica)
        assert [each["batching"]["maxBatchSize"] for each in result["candidates"]] == [4, 2]
        for candidate in result["candidates"]:
            assert candidate["problem"] is None
            assert [trial["problems"] for trial in candidate["trials"]] == [{}, {}]
        assert spec_of(namespace) == before
        assert kube.get("infsvc", "tuned-tune", namespace) is None
    kube.wait_ready("tuned", namespace)


def check_sizes(namespace: str) -> None:
    """The status tells the sizes with which the engine has started."""
    derived = kube.get("infsvc", "tuned", namespace)["status"]["effective"]["derived"]  # type: ignore[index]
    values = {each["name"]: each["value"].split()[0] for each in derived}
    pods = f"{INFERENCE_SERVICE_LABEL}=tuned"
    log = kube.kubectl("logs", "-l", pods, "-n", namespace, "-c", "engine", "--tail=-1")
    started = re.search(r"event=sized_by_workload max_model_len=(\d+) num_kv_blocks=(\d+)", log)
    assert started, log
    assert started.groups() == (values["engine.maxModelLen"], values["kvCache.blockBudget"])


def tune(namespace: str, *flags: str) -> dict[str, Any]:
    command = ("conveyor", "tune", "tuned", "-n", namespace, "--objective", "latency=60s", *LOAD, *flags, "-o", "json")
    result: dict[str, Any] = json.loads(kube.kubectl(*command, timeout_seconds=900))
    return result


def spec_of(namespace: str) -> dict[str, Any]:
    body = kube.get("infsvc", "tuned", namespace)
    assert body is not None
    spec: dict[str, Any] = body["spec"]
    return spec
