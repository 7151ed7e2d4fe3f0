"""Tests `spec.metadata`: labels on all children, on a real API server, and none on the pods."""

import pytest
from tests.operator.builders import OWNER, make_resource
from tests.operator.stage import CHILD_KINDS, Json, Stage, wait_until

from conveyor_operator.inferenceservice.manifests.config import build_engine_config
from conveyor_operator.inferenceservice.manifests.pods import build_pod_template

GIVEN = {"labels": {"cost-center": "42"}}


def metadata(stage: Stage) -> dict[tuple[str, str], Json]:
    """Return the metadata of each child of the service `qwen`, by kind and name."""
    return {(kind, name): stage.space.need(kind, name)["metadata"] for kind, name in stage.space.children("qwen")}


def has_given(found: Json, value: str = "42") -> bool:
    return bool(found["labels"].get("cost-center") == value)


def test_every_child_has_the_labels_and_no_pod_is_replaced(stage: Stage) -> None:
    space = stage.space
    with stage.operator():
        model = {
            "uri": "hf://org/name@main",
            "cache": {"strategy": "PVC", "size": "1Gi", "accessMode": "ReadWriteMany"},
        }
        space.make_service(metadata=GIVEN, model=model, autoscaling={"maxReplicas": 3})
        space.wait_children("qwen")
        wait_until("them", lambda: all(map(has_given, metadata(stage).values())), 60, lambda: metadata(stage))
        kinds = {kind for kind, _ in metadata(stage)}
        assert set(CHILD_KINDS) - kinds <= {"Job", "NetworkPolicy"}
        before = space.need("Deployment", "qwen-engine")["spec"]["template"]
        assert "cost-center" not in str(before)
        space.edit("qwen", metadata={"labels": {"cost-center": "7"}})
        wait_until("the edit", lambda: all(has_given(each, "7") for each in metadata(stage).values()), 60)
        space.patch("Service", "qwen", {"metadata": {"labels": {"cost-center": None}}})
        wait_until("the label again", lambda: has_given(space.need("Service", "qwen")["metadata"], "7"), 60)
        space.edit("qwen", metadata=None)
        wait_until("their end", lambda: "cost-center" not in str(metadata(stage)), 60, lambda: metadata(stage))
        assert space.need("Deployment", "qwen-engine")["spec"]["template"] == before


SECURITY = {
    "seccompProfile": {"type": "Localhost", "localhostProfile": "profiles/engine.json"},
    "appArmorProfile": {"type": "RuntimeDefault"},
    "seLinuxOptions": {"level": "s0:c1,c2"},
}


@pytest.mark.parametrize("profile", [None, SECURITY["seccompProfile"]])
def test_profiles_of_the_node_reach_the_pod_and_each_container(profile: Json | None) -> None:
    given = SECURITY if profile else {}
    pod = {"securityContext": given, "hostUsers": False, "hostAliases": [{"ip": "10.0.0.7", "hostnames": ["hub"]}]}
    pod |= {"dnsConfig": {"options": [{"name": "ndots", "value": "1"}]}}
    spec = make_resource(pod=pod).spec
    built = build_pod_template(OWNER, spec, build_engine_config(OWNER, spec, False), 1000, "cluster.local")["spec"]
    expected = profile or {"type": "RuntimeDefault"}
    contexts = [built, *built["initContainers"], *built["containers"]]
    assert [each["securityContext"]["seccompProfile"] for each in contexts] == [expected] * len(contexts)
    assert given.items() <= built["securityContext"].items()
    assert {key: built[key] for key in ("hostUsers", "hostAliases", "dnsConfig")} == {
        key: pod[key] for key in ("hostUsers", "hostAliases", "dnsConfig")
    }
