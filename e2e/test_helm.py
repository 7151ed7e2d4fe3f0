"""A team's own chart has an InferenceService. `helm upgrade --wait` waits for engines that run the new spec.

With `--rollback-on-failure`, Helm reports an upgrade that cannot start, and rolls it back. No request fails meanwhile.
Helm judges the service by kstatus (docs/gitops.md).
"""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from e2e import kube
from e2e.gateway import service_url
from e2e.load import running_load
from e2e.services import service

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

NAME = "team"
BODY = {"model": NAME, "max_tokens": 200, "min_tokens": 150, "temperature": 0.8}
TEMPLATE = """
apiVersion: conveyor.dev/v1alpha1
kind: InferenceService
metadata: {name: {{ .Release.Name }}}
spec: {{- toYaml .Values.spec | nindent 2 }}
"""
CANNOT_START = {  # values, and a part of the cause that Helm prints
    "engine.image=registry.example.com/conveyor/engine:nope": "engine:nope cannot be pulled",
    "model.uri=pvc://models/nowhere": "there is no directory /models/pvc/nowhere",
    "kvCache.blockBudget=9000000": "lower kvCache.blockBudget to",
}
Upgrade = Callable[..., str]


@pytest.fixture
def upgrade(namespace: str, tmp_path: Path) -> Upgrade:
    """Return a function that installs or upgrades the team's chart with a value of the spec, and other flags."""
    (tmp_path / "templates").mkdir()
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump({"apiVersion": "v2", "name": NAME, "version": "0.0.1"}))
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({"spec": service(NAME, replicas=1)["spec"]}))
    (tmp_path / "templates/service.yaml").write_text(TEMPLATE)

    def run(value: str | None = None, *flags: str) -> str:
        chosen = ("--set", f"spec.{value}") if value else ()
        return kube.helm("upgrade", NAME, str(tmp_path), "-n", namespace, "--wait", *chosen, *flags)

    return run


async def test_helm_waits_for_new_engines_and_rolls_back_what_cannot_start(
    upgrade: Upgrade, namespace: str, record_property: Callable[[str, object], None]
) -> None:
    took = [await timed(upgrade, None, "--install", "--timeout", "240s")]
    ready = kube.condition(kube.get("infsvc", NAME, namespace), "Ready")
    assert ready.get("status") == "True", "Helm returned before an engine was ready"
    first, spec = find_engines(namespace), find_spec(namespace)
    assert await asyncio.to_thread(ask_engine, namespace) in first, "the service answers when Helm returns"
    async with running_load(service_url(NAME, namespace), BODY, concurrency=4) as load:
        await asyncio.to_thread(kube.wait_until, "streams run", lambda: load.tokens > 20)
        for value, cause in CANNOT_START.items():
            with pytest.raises(kube.CommandFailed, match="rolled back") as caught:
                await asyncio.to_thread(upgrade, value, "--rollback-on-failure", "--timeout", "240s")
            assert cause in str(caught.value)
            assert find_engines(namespace) == first, "the former engine stays"
            assert find_spec(namespace) == spec
        took.append(await timed(upgrade, "kvCache.blockBudget=192", "--rollback-on-failure", "--timeout", "240s"))
        second = find_engines(namespace)
        assert len(second) == 1
        assert not second & first, "Helm returned before the engine ran the new spec"
        assert await asyncio.to_thread(ask_engine, namespace) in second
        begun = len(load.answers)
        await asyncio.to_thread(kube.wait_until, "the new engines answer", lambda: len(load.answers) > begun + 8)
    assert not load.failed, [answer.error for answer in load.failed]
    revisions = json.loads(kube.helm("history", NAME, "-n", namespace, "-o", "json"))
    assert [each["status"] for each in revisions] == [*3 * ("superseded", "failed"), "superseded", "deployed"]
    record_property("figure", f"helm --wait: {took[0]:.0f} s for an install, {took[1]:.0f} s for an upgrade")


async def timed(upgrade: Upgrade, *arguments: str | None) -> float:
    """Return how many seconds an upgrade took."""
    begun = time.monotonic()
    await asyncio.to_thread(upgrade, *arguments)
    return time.monotonic() - begun


def find_spec(namespace: str) -> Any:
    return (kube.get("infsvc", NAME, namespace) or {}).get("spec")


def find_engines(namespace: str) -> set[str]:
    """Return the names of the pods that are not being deleted."""
    pods = kube.list_("pods", namespace, f"conveyor.dev/inference-service={NAME}")
    return {pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"]}


def ask_engine(namespace: str) -> str:
    """Send a request, and return the name of the pod that answered it."""
    url, body = f"{service_url(NAME, namespace)}/completions", {"prompt": "with open(", "max_tokens": 4}
    answer = httpx.post(url, json=body, headers={"X-Receipt": "true"}, timeout=60).raise_for_status()
    return str(answer.json()["usage"]["receipt"]["engine"])
