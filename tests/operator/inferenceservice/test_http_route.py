"""Checks the HTTPRoute of docs/operations.md with the Gateway API's own definition."""

from typing import Any

import pytest
import yaml
from tests.operator.stage import install_definition

from e2e import go_module
from e2e.cluster.api import Api, ApiError
from e2e.cluster.paths import REPOSITORY

GATEWAY_API = "sigs.k8s.io/gateway-api@v1.6.1"
DEFINITION = "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml"
COLLECTION = "/apis/gateway.networking.k8s.io/v1/namespaces/{}/httproutes?fieldValidation=Strict"


def read_route() -> dict[str, Any]:
    page = (REPOSITORY / "docs" / "operations.md").read_text()
    (found,) = (block.split("```")[0] for block in page.split("```yaml\n")[1:] if "kind: HTTPRoute" in block)
    return dict(yaml.safe_load(found))


def test_the_documented_route_is_one(api: Api, namespace: str) -> None:
    install_definition(api, go_module.fetch(GATEWAY_API) / DEFINITION)
    route = read_route()
    route["metadata"]["namespace"] = namespace
    api.create(COLLECTION.format(namespace), route)
    wrong = route | {"metadata": {"name": "wrong"}, "spec": route["spec"] | {"rules": [{"weight": 1}]}}
    with pytest.raises(ApiError):
        api.create(COLLECTION.format(namespace), wrong)
