"""Tests policies that change children when the operator writes them: the operator does not fight with them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.operator.stage import Json, Stage, wait_until

MIRROR = "mirror.example.com/"
GROUP = "/apis/admissionregistration.k8s.io/v1"
RULE = {"operations": ["CREATE", "UPDATE"], "scope": "Namespaced"}
ALL_CHILDREN = [
    RULE | {"apiGroups": ["apps"], "apiVersions": ["v1"], "resources": ["deployments"]},
    RULE | {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["services", "serviceaccounts"]},
    RULE | {"apiGroups": ["networking.k8s.io"], "apiVersions": ["v1"], "resources": ["networkpolicies"]},
    RULE | {"apiGroups": ["policy"], "apiVersions": ["v1"], "resources": ["poddisruptionbudgets"]},
]
ADD_LABEL = """[JSONPatch{op: "add", path: "/metadata/labels/" + jsonpatch.escapeKey("cost-center"), value: "42"}]"""
USE_MIRROR = f"""object.spec.template.spec.containers[0].image.startsWith("{MIRROR}") ? [] : [JSONPatch{{
  op: "replace", path: "/spec/template/spec/containers/0/image",
  value: "{MIRROR}" + object.spec.template.spec.containers[0].image
}}]"""


@contextmanager
def mutating(stage: Stage, what: str, rules: list[Json], patch: str) -> Iterator[None]:
    """Apply the JSON patch, a CEL expression, to each write of these objects in the namespace."""
    name = f"{stage.space.namespace}-{what}"
    selector = {"matchLabels": {"kubernetes.io/metadata.name": stage.space.namespace}}
    policy = {
        "matchConstraints": {"resourceRules": rules, "namespaceSelector": selector},
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": patch}}],
        "reinvocationPolicy": "Never",
        "failurePolicy": "Fail",
    }
    kinds = {"mutatingadmissionpolicies": policy, "mutatingadmissionpolicybindings": {"policyName": name}}
    for kind, spec in kinds.items():
        stage.space.api.create(f"{GROUP}/{kind}", {"metadata": {"name": name}, "spec": spec})
    try:
        yield
    finally:
        for kind in kinds:
            stage.space.api.delete(f"{GROUP}/{kind}/{name}")


def is_mutated(stage: Stage, probe: str) -> bool:
    """Create an object that both policies change, and return whether they did."""
    container = {"name": "engine", "image": "probe"}
    labels = {"probe": probe}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    spec = {"replicas": 0, "selector": {"matchLabels": labels}, "template": template}
    made = stage.space.create("Deployment", {"metadata": {"name": probe, "labels": labels}, "spec": spec})
    stage.space.delete("Deployment", probe)
    image = made["spec"]["template"]["spec"]["containers"][0]["image"]
    return "cost-center" in made["metadata"]["labels"] and image == f"{MIRROR}probe"


def test_what_policies_of_the_cluster_change_is_kept(stage: Stage) -> None:
    space = stage.space
    with ExitStack() as stack:
        stack.enter_context(mutating(stage, "label", ALL_CHILDREN, ADD_LABEL))
        stack.enter_context(mutating(stage, "mirror", ALL_CHILDREN[:1], USE_MIRROR))
        probes = iter(f"probe-{number}" for number in range(1000))
        wait_until("the policies act", lambda: is_mutated(stage, next(probes)))
        stack.enter_context(stage.operator())
        space.make_service()
        space.wait_children("qwen")
        stage.proxy.wait_quiet()
        deployment = space.need("Deployment", "qwen-engine")
        assert deployment["spec"]["template"]["spec"]["containers"][0]["image"].startswith(MIRROR)
        assert deployment["metadata"]["labels"]["cost-center"] == "42"
        assert space.need("NetworkPolicy", "qwen-engine")["metadata"]["labels"]["cost-center"] == "42"
        space.edit("qwen", batching={"maxBatchSize": 8})
        wait_until("the edit", lambda: len(space.config_maps()) == 2)
        stage.proxy.wait_quiet()
        deployment = space.need("Deployment", "qwen-engine")
        assert deployment["metadata"]["generation"] == 2
        assert deployment["spec"]["template"]["spec"]["containers"][0]["image"].startswith(MIRROR)
        events = space.api.get(f"/api/v1/namespaces/{space.namespace}/events")["items"]
        assert "Restored" not in {each["reason"] for each in events}
