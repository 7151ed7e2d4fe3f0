"""Judges objects by Kyverno's policies, on a real API server.

The policies are CEL for the API server's own admission (`ValidatingPolicy`). Kyverno too lets the API server judge by
them, as ValidatingAdmissionPolicies. Here they warn, so that one dry run of an object has the names of all policies
that it breaks.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import httpx
import yaml
from tests.chart.installation import Json, helm, path_of

from e2e import go_module
from e2e.cluster.api import Api, read_kubeconfig

LIBRARY = "best_practices.yaml"
KYVERNO = "github.com/kyverno/kyverno@v1.19.1"
_OF_POLICY = ("matchConstraints", "matchConditions", "variables", "validations")
_BROKEN = re.compile(r"Validation failed for ValidatingAdmissionPolicy '([^']+)'")


class Breach(NamedTuple):
    policy: str
    object: str
    """Kind/name"""


@cache
def pod_security() -> dict[str, Json]:
    """Return the Pod Security Standards `baseline` and `restricted`, from the chart in Kyverno's Go module."""
    flags = ("--set=podSecurityStandard=restricted", "--set=includeOtherPolicies={require-non-root-groups}")
    rendered = helm("template", "policies", go_module.fetch(KYVERNO) / "charts" / "kyverno-policies", *flags)
    return {policy["metadata"]["name"]: policy["spec"] for policy in yaml.safe_load_all(rendered) if policy}


def best_practices() -> dict[str, Json]:
    """Return policies of Kyverno's library."""
    return {policy.pop("name"): policy for policy in yaml.safe_load((Path(__file__).parent / LIBRARY).read_text())}


class Judge:
    """An API server with policies."""

    def __init__(self, kubeconfig: Path, policies: dict[str, Json]) -> None:
        self._api = Api(kubeconfig)
        server, tls = read_kubeconfig(kubeconfig)
        self._client = httpx.Client(base_url=server, verify=tls, timeout=60, trust_env=False)
        for name, policy in policies.items():
            spec = {key: policy[key] for key in _OF_POLICY if key in policy}
            self._apply("Policy", "validatingadmissionpolicies", name, spec)
            binding = {"policyName": name, "validationActions": ["Warn"]}
            self._apply("PolicyBinding", "validatingadmissionpolicybindings", name, binding)

    def _apply(self, kind: str, plural: str, name: str, spec: Json) -> None:
        version = "admissionregistration.k8s.io/v1"
        body = {"apiVersion": version, "kind": f"ValidatingAdmission{kind}", "metadata": {"name": name}, "spec": spec}
        self._api.apply(f"/apis/{version}/{plural}/{name}", body)

    def close(self) -> None:
        self._client.close()

    def find_breaches(self, objects: list[Json]) -> set[Breach]:
        """Return which policies the objects break. Nothing is created."""
        return {breach for each in objects for breach in self._judge(each)}

    def _judge(self, item: Json) -> Iterator[Breach]:
        path = path_of(self._api, item)
        answer = self._client.patch(
            path,
            params={"dryRun": "All", "fieldManager": "judge", "force": "true"},
            content=yaml.safe_dump(item),
            headers={"Content-Type": "application/apply-patch+yaml"},
        )
        assert answer.is_success, (item["kind"], item["metadata"]["name"], answer.text)
        for warning in answer.headers.get_list("Warning"):
            for policy in _BROKEN.findall(warning):
                yield Breach(policy, f"{item['kind']}/{item['metadata']['name']}")
