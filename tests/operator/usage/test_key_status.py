"""Tests on a real API server that the status of APIKeys says when they were used last, and why they were rejected."""

import asyncio
import contextlib
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web
from tests.gateway.cluster import own_address
from tests.gateway.engine_servers import answering, running_engine
from tests.gateway.keys import make_api_key
from tests.operator.usage.test_keeper import until

from conveyor_api import names
from conveyor_kube.gateways import Gateway
from conveyor_kube.kubeconfig import load_configuration
from conveyor_kubectl.command import main
from conveyor_operator.cluster import Cluster
from conveyor_operator.metrics import Metrics
from conveyor_operator.usage import key_status
from conveyor_operator.usage.key_status import KeyStatusKeeper, build_status
from conveyor_protocol.key_uses import KeyUse
from e2e.cluster.api import Api, ApiError
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions


async def test_the_status_has_what_any_gateway_has_seen_last(
    control_plane: ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(key_status, "_PERIOD_SECONDS", 0.1)
    api, today = Api(control_plane.kubeconfig), datetime.now(UTC).date().isoformat()
    await asyncio.to_thread(install_definitions, api)
    path = f"/apis/{names.API_VERSION}/namespaces/{namespace}/{names.API_KEY_PLURAL}"
    for name in ("ci", "idle"):
        api.create(path, make_api_key(namespace, name))
    uses: list[list[Any]] = [
        [namespace, "gone", today, "", ""],
        [namespace, "ci", "2026-11-01", "2026-11-02", "Expired"],
    ]
    older = {"cursor": "b:1", "keys": [[namespace, "ci", "2026-10-01", "2026-10-01", "NotFound"]]}
    page = {"cursor": "a:1", "keys": uses}

    def find(name: str = "ci") -> Any:
        return api.get(f"{path}/{name}")

    async with (
        running_engine(answering(web.json_response, data=page)) as first,
        running_engine(answering(web.json_response, data=older)) as second,
    ):
        gateways = [Gateway(own_address(), each.port, serving=True) for each in (first, second)]
        configuration = await load_configuration(str(control_plane.kubeconfig))
        async with Cluster(configuration, Metrics()) as cluster:
            running = asyncio.create_task(KeyStatusKeeper(cluster, lambda: gateways).run())
            expected = {"lastUsed": "2026-11-01", "lastRejection": {"day": "2026-11-02", "reason": "Expired"}}
            await until(lambda: find().get("status") == expected)
            version = find()["metadata"]["resourceVersion"]
            asked = len(second.requests)
            await until(lambda: len(second.requests) > asked + 2)
            assert find()["metadata"]["resourceVersion"] == version, "what is known is not written again"
            assert second.requests[-1][0].query["after"] == "b:1"
            uses[1][2] = today
            await until(lambda: find()["status"] == {**expected, "lastUsed": today})
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
    assert "status" not in find("idle")

    def show() -> str:
        assert main(["key", "list", "-n", namespace, f"--kubeconfig={control_plane.kubeconfig}"]) == 0
        return capsys.readouterr().out

    head, ci, idle = [line.split() for line in (await asyncio.to_thread(show)).splitlines()]
    assert head[-3:] == ["LAST", "USED", "REJECTED"]
    assert ci[-3:] == [today, "2026-11-02", "Expired"]
    assert idle[-2:] == ["-", "-"]


async def test_a_key_whose_status_cannot_be_written_delays_no_other_key(
    control_plane: ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A webhook that does not respond makes the API server answer 500."""
    monkeypatch.setattr(key_status, "_PERIOD_SECONDS", 0.1)
    api = Api(control_plane.kubeconfig)
    await asyncio.to_thread(install_definitions, api)
    path = f"/apis/{names.API_VERSION}/namespaces/{namespace}/{names.API_KEY_PLURAL}"
    for name in ("blocked", "free"):
        body = make_api_key(namespace, name)
        body["metadata"]["labels"] = {name: ""}
        api.create(path, body)
    webhook = build_broken_webhook(namespace, "blocked")
    webhooks = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    api.create(webhooks, webhook)
    page = {"cursor": "a:1:1", "keys": [[namespace, name, "2026-11-01", "", ""] for name in ("blocked", "free")]}

    def is_blocked() -> bool:
        try:
            api.patch_json(f"{path}/blocked", [{"op": "add", "path": "/spec/owner", "value": "ann"}])
        except ApiError as error:
            return error.code == 500
        return False

    try:
        await until(is_blocked)
        async with running_engine(answering(web.json_response, data=page)) as engine:
            gateways = [Gateway(own_address(), engine.port, serving=True)]
            configuration = await load_configuration(str(control_plane.kubeconfig))
            async with Cluster(configuration, Metrics()) as cluster:
                running = asyncio.create_task(KeyStatusKeeper(cluster, lambda: gateways).run())
                await until(lambda: api.get(f"{path}/free").get("status") == {"lastUsed": "2026-11-01"})
                await until(lambda: engine.requests[-1][0].query["after"] == "a:1:1")
                running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await running
        assert "status" not in api.get(f"{path}/blocked")
    finally:
        api.delete(f"{webhooks}/{webhook['metadata']['name']}")


def build_broken_webhook(namespace: str, label: str) -> dict[str, Any]:
    """Return a webhook for APIKeys of the namespace with the label, at a port where nobody listens."""
    rule = {"apiGroups": ["conveyor.dev"], "apiVersions": ["*"], "operations": ["UPDATE"]}
    hook = {
        "name": "broken.conveyor.dev",
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "rules": [{**rule, "resources": [names.API_KEY_PLURAL, f"{names.API_KEY_PLURAL}/status"]}],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "objectSelector": {"matchExpressions": [{"key": label, "operator": "Exists"}]},
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 1,
    }
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": f"broken-{namespace}"},
        "webhooks": [hook],
    }


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"lastUsed": "2026-11-02"}),
        ({"lastUsed": "2026-11-03"}, {"lastUsed": "2026-11-03"}),
        (
            {"lastRejection": {"day": "2026-11-01", "reason": "Expired"}},
            {"lastUsed": "2026-11-02", "lastRejection": {"day": "2026-11-01", "reason": "Expired"}},
        ),
    ],
)
def test_only_later_days_change_the_status(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert build_status(before, KeyUse("team", "ci", "2026-11-02")) == after
