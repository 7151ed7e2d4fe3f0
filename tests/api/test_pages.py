"""Applies what the pages and the examples show to a real API server."""

import re
from pathlib import Path

import pytest
import yaml
from tests.api.builders import build_body
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


def test_the_documentation_s_parts_of_a_spec_are_taken(services: Services) -> None:
    titles = ("docs/models.md", "docs/quantization.md", "docs/vllm.md", "docs/speculation.md")
    pages = [(REPOSITORY / page).read_text() for page in titles]
    parts = re.findall(r"```yaml\n(.*?)```", "".join(pages), re.DOTALL)
    bodies = [build_body(f"part-{number}", **yaml.safe_load(part)) for number, part in enumerate(parts)]
    for body in bodies:
        InferenceService.parse(body)
    embeds, in_bucket, in_image, mirrored, rounded, in_gguf, vllm, drafts, guessed, own_head, head = (
        services.create(body)["spec"] for body in bodies
    )
    assert embeds["engine"]["maxQueuedRequests"] == 2048
    assert in_bucket["model"]["secretRef"] == {"name": "bucket"}
    assert in_image["pod"]["imagePullSecrets"] == [{"name": "registry"}]
    assert mirrored["pod"]["env"][0]["name"] == "HF_ENDPOINT"
    assert rounded["model"]["quantization"] == "INT8"
    assert in_gguf["model"]["uri"].endswith(":Q4_K_M")
    assert vllm["runtime"] == "VLLM"
    assert drafts["speculation"] == {"method": "NGram", "maxTokens": 8}
    assert guessed["speculation"]["draft"] == {"uri": "hf://Qwen/Qwen3-0.6B"}
    assert own_head["speculation"] == {"method": "MTP", "maxTokens": 2}
    assert head["speculation"]["draft"]["uri"].endswith("eagle3")


def test_credentials_of_a_csi_driver_are_taken_as_the_page_says(services: Services) -> None:
    page = (REPOSITORY / "docs/governed.md").read_text().partition("## Credentials")[2]
    (part,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    pod = services.create(build_body("vault", **yaml.safe_load(part)))["spec"]["pod"]
    assert pod["volumes"][0]["csi"]["driver"] == "secrets-store.csi.k8s.io"
    assert pod["env"][0]["value"].startswith(pod["volumeMounts"][0]["mountPath"])


def test_the_adapters_of_the_page_are_taken(services: Services) -> None:
    page = (REPOSITORY / "docs/adapters.md").read_text()
    body = yaml.safe_load(page.partition("<<EOF\n")[2].partition("EOF\n")[0])
    adapters = services.create(body)["spec"]["adapters"]
    assert [adapter["name"] for adapter in adapters] == ["sql", "support"]
    assert InferenceService.parse(body, known_only=True).served_model_name == "qwen"


@pytest.mark.parametrize("example", sorted((REPOSITORY / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_an_example_is_taken_and_means_what_it_says(services: Services, example: Path) -> None:
    body = yaml.safe_load(example.read_text())
    assert InferenceService.parse(services.create(body)).spec == InferenceService.parse(body).spec


def test_the_volume_of_a_cache_on_each_node_is_taken(
    services: Services, api: Api, kubeconfig: Path, namespace: str, tmp_path: Path
) -> None:
    page = (REPOSITORY / "docs/operations.md").read_text().partition("## A cache on each node")[2]
    manifest = tmp_path / "volume.yaml"
    manifest.write_text(page.partition("```yaml\n")[2].partition("```")[0].replace("team-a", namespace))
    kubectl(kubeconfig, namespace, "apply", "--filename", str(manifest))
    claim = api.get(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/models-on-nodes")
    assert api.get(f"/api/v1/persistentvolumes/{claim['spec']['volumeName']}")["spec"]["local"]
    cache = re.search(r"`cache: (\{.*?\})`", page)
    assert cache is not None
    services.create(build_body(model={"uri": "hf://Qwen/Qwen3-0.6B", "cache": yaml.safe_load(cache[1])}))
