"""Installs Conveyor's CRDs on an API server, and writes the claim that gateways need to become ready.

For tests and benchmarks that run a gateway without an operator, or an operator without the chart.
"""

import yaml

from conveyor_api.names import SYSTEM_NAMESPACE
from conveyor_api.served_name import build_served_name, root_name
from e2e.cluster.api import Api, wait_until
from e2e.cluster.paths import REPOSITORY


def install_definitions(api: Api) -> None:
    """Apply the CRDs and claim the gateways' own name. Returns when the API serves all kinds."""
    for file in sorted((REPOSITORY / "crds").glob("*.yaml")):
        crd = yaml.safe_load(file.read_text(encoding="utf-8"))
        api.apply(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd['metadata']['name']}", crd)
        spec = crd["spec"]
        path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
        wait_until(spec["names"]["kind"], lambda path=path: api.reachable(path))
    claim_root(api)


def claim_name(api: Api, namespace: str, name: str) -> None:
    """Claim a name for a service's namespace, as the operator does."""
    claim = build_served_name(namespace, name)
    api.apply(f"/apis/conveyor.dev/v1alpha1/namespaces/{namespace}/servednames/{claim['metadata']['name']}", claim)


def claim_root(api: Api, system_namespace: str = SYSTEM_NAMESPACE) -> None:
    """Claim the gateways' own name. The operator does this after the names of all services; gateways wait for it."""
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": system_namespace}}
    api.apply(f"/api/v1/namespaces/{system_namespace}", namespace)
    claim_name(api, system_namespace, root_name(system_namespace))
