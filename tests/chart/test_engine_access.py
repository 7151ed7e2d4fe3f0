"""Tests the chart with engines that answer only gateways."""

import re

import pytest
import yaml
from tests.chart.installation import HelmFailed, find, path_of, render

from conveyor_api.names import SYSTEM_NAMESPACE
from e2e.cluster.api import Api, wait_until
from e2e.cluster.paths import REPOSITORY

ROLE = ("Role", "conveyor-gateway-gateways")


def read_page() -> str:
    """Return the page's value as a flag of helm."""
    section = (REPOSITORY / "docs/keys.md").read_text().partition("## Engines that answer only gateways")[2]
    (block,) = re.findall(r"```yaml\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    ((part, values),) = yaml.safe_load(block).items()
    ((name, value),) = values.items()
    return f"{part}.{name}={value}"


def find_args(objects: list[dict], process: str) -> list[str]:  # type: ignore[type-arg]
    (container,) = find(objects, "Deployment", f"conveyor-{process}")["spec"]["template"]["spec"]["containers"]
    args: list[str] = container["args"]
    return args


@pytest.mark.parametrize(
    ("given", "account"), [((), "conveyor-gateway"), (("gateway.serviceAccount.name=edge",), "edge")]
)
def test_the_page_s_value_lets_the_gateways_prove_their_account(given: tuple[str, ...], account: str) -> None:
    objects = render(read_page(), *given)
    assert f"--gateway-account={account}" in find_args(objects, "operator")
    assert f"--service-account={account}" in find_args(objects, "gateway")
    (rule,) = [rule for rule in find(objects, *ROLE)["rules"] if rule["apiGroups"] == [""]]
    assert rule["resources"] == ["serviceaccounts/token"]
    assert (rule["resourceNames"], rule["verbs"]) == ([account], ["create"])


def test_the_gateway_may_create_tokens_of_no_other_account(api: Api) -> None:
    objects = render(read_page())
    for kind in ("Role", "RoleBinding"):
        body = find(objects, kind, ROLE[1])
        api.apply(path_of(api, body), body)

    def may(verb: str, account: str, subresource: str = "token") -> bool:
        what = {"resource": "serviceaccounts", "subresource": subresource, "name": account, "verb": verb}
        user = f"system:serviceaccount:{SYSTEM_NAMESPACE}:conveyor-gateway"
        spec = {"user": user, "resourceAttributes": {"namespace": SYSTEM_NAMESPACE, **what}}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
        allowed: bool = api.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)["status"]["allowed"]
        return allowed

    wait_until("the API server to know the role", lambda: may("create", "conveyor-gateway"))
    assert not may("create", "conveyor-operator")
    assert not may("get", "conveyor-gateway")
    assert not may("create", "conveyor-gateway", "")


def test_by_default_engines_answer_everyone_and_gateways_keep_the_right_for_engines_that_still_verify() -> None:
    objects = render()
    assert not any(arg.startswith("--gateway-account") for arg in find_args(objects, "operator"))
    assert find(objects, *ROLE)["rules"] == find(render(read_page()), *ROLE)["rules"]


def test_no_process_may_read_more_secrets_with_it() -> None:
    def list_secret_rules(*values: str) -> list[object]:
        roles = [each for each in render(*values) if each["kind"] in ("Role", "ClusterRole")]
        return [rule for role in roles for rule in role.get("rules", []) if "secrets" in rule.get("resources", [])]

    assert list_secret_rules(read_page(), "gateway.access=Enforced") == list_secret_rules()


def test_other_values_are_rejected() -> None:
    with pytest.raises(HelmFailed, match=r"access"):
        render("engine.access=Nobody")
