"""Applies what the pages for platform teams show to a real API server."""

from pathlib import Path

import yaml
from tests.api.conftest import Services
from tests.kubectl import kubectl

from conveyor_api.resource import InferenceService
from e2e.cluster.api import Api
from e2e.cluster.paths import REPOSITORY


def read_blocks(page: str, section: str) -> list[str]:
    """Return the YAML blocks of a section of a page."""
    text = (REPOSITORY / page).read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    return [block.partition("```")[0] for block in text.split("```yaml\n")[1:]]


def test_the_policy_for_addresses_is_taken(api: Api, kubeconfig: Path, namespace: str, tmp_path: Path) -> None:
    _, policy = read_blocks("docs/expose.md", "Close the port behind the proxy")
    manifest = tmp_path / "policy.yaml"
    manifest.write_text(policy.replace("conveyor-system", namespace))
    kubectl(kubeconfig, namespace, "apply", "--filename", str(manifest))
    path = f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies/clients-by-address"
    (rule,) = api.get(path)["spec"]["ingress"]
    assert rule["from"] == [{"ipBlock": {"cidr": "192.0.2.0/24"}}]


def test_the_service_for_nodes_on_demand_is_taken(services: Services, namespace: str) -> None:
    _, service = read_blocks("docs/real-cluster.md", "Nodes that are added on demand")
    found = InferenceService.parse(services.create(yaml.safe_load(service.replace("team-a", namespace)))).spec
    assert found.rollout.given == (1, 0)
    assert 5 + found.drain.timeout_seconds < 30
