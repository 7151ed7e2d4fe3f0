"""Tests on a real API server that credentials are files, in a cluster that refuses Secrets in variables."""

from collections.abc import Iterator

import pytest
from tests.operator.kubelet import Kubelet, fetch_failed
from tests.operator.stage import Json, Stage, wait_until

from e2e.cluster.api import ApiError

POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolic"
VARIABLE = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "own", "key": "key"}}}
CACHE = {"strategy": "PVC", "size": "1Gi", "prewarm": True}
HUB = {"uri": "hf://example/model", "secretRef": {"name": "hub"}, "cache": CACHE}
BUCKET = {"name": "sql", "uri": "s3://models/sql", "secretRef": {"name": "bucket"}}
# Kyverno's `secrets-not-from-env-vars`, for init containers too.
RULE = """(object.spec.template.spec.containers + object.spec.template.spec.?initContainers.orValue([])).all(container,
    !has(container.env) || container.env.all(env, !has(env.valueFrom) || !has(env.valueFrom.secretKeyRef)))"""


@pytest.fixture
def _refused(stage: Stage) -> Iterator[None]:
    """Refuse Deployments and Jobs of the namespace that have Secrets in variables."""
    api, name = stage.space.api, f"files-{stage.space.namespace}"
    rules = [
        {"apiGroups": [group], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"], "resources": [resource]}
        for group, resource in (("apps", "deployments"), ("batch", "jobs"))
    ]
    here = {"matchLabels": {"kubernetes.io/metadata.name": stage.space.namespace}}
    policy = {
        "matchConstraints": {"resourceRules": rules},
        "validations": [{"expression": RULE, "message": "a Secret is in a variable"}],
    }
    binding = {"policyName": name, "validationActions": ["Deny"], "matchResources": {"namespaceSelector": here}}
    api.create(f"{POLICIES}ies", {"metadata": {"name": name}, "spec": policy})
    api.create(f"{POLICIES}ybindings", {"metadata": {"name": name}, "spec": binding})
    wait_until("the policy", lambda: is_refused(stage))
    yield
    api.delete(f"{POLICIES}ybindings/{name}")
    api.delete(f"{POLICIES}ies/{name}")


def is_refused(stage: Stage) -> bool:
    """Return whether the API server refuses a Job with a Secret in a variable."""
    container = {"name": "a", "image": "a", "env": [VARIABLE]}
    template = {"spec": {"containers": [container], "restartPolicy": "Never"}}
    try:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": {"template": template}}
        stage.space.api.create(stage.space.path("Job") + "?dryRun=All", job)
    except ApiError as error:
        return "a Secret is in a variable" in str(error)
    return False


@pytest.mark.usefixtures("_refused")
def test_a_cluster_that_refuses_secrets_in_variables_accepts_credentials(stage: Stage) -> None:
    with stage.operator():
        stage.space.make_service(pod={"env": [VARIABLE]})
        refusal = stage.space.wait_condition("qwen", "Ready", "False", "ChildRefused")
        assert "a Secret is in a variable" in refusal["message"]
        stage.space.make_service("private", model=HUB, adapters=[BUCKET])
        wait_until("the Job", lambda: job(stage))
        spec = job(stage)["spec"]["template"]["spec"]
        stage.space.edit("private", model={"cache": {"prewarm": None}})
        stage.space.wait_children("private")
        pods = stage.space.need("Deployment", "private-engine")["spec"]["template"]["spec"]
    for each in (spec, pods):
        assert {volume["name"]: volume["secret"] for volume in each["volumes"] if "secret" in volume} == {
            "conveyor-credentials-fetch": {
                "secretName": "hub",
                "items": [{"key": "token", "path": "HF_TOKEN"}],
                "optional": True,
                "defaultMode": 0o644,
            },
            "conveyor-credentials-fetch-adapter-0": {
                "secretName": "bucket",
                "items": [{"key": key, "path": key} for key in KEYS],
                "optional": True,
                "defaultMode": 0o644,
            },
        }
    mounted = {
        container["name"]: [mount["mountPath"] for mount in container["volumeMounts"] if is_of_secret(mount)]
        for container in (*pods["initContainers"], *pods["containers"])
    }
    assert mounted == {
        "fetch": ["/etc/conveyor-credentials/hub"],
        "fetch-adapter-0": ["/etc/conveyor-credentials/bucket"],
        "engine": [],
    }


KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL")


def is_of_secret(mount: Json) -> bool:
    return bool(mount["name"].startswith("conveyor-credentials"))


def job(stage: Stage) -> Json:
    found = stage.space.list("Job")
    return found[0] if found else {}


def test_a_missing_secret_is_in_the_status_and_may_pass(stage: Stage) -> None:
    message = "Secret hub does not exist in this namespace, or lacks the key of secretRef.key (token by default)"
    with stage.operator(), Kubelet(stage.space, lambda pod: fetch_failed(pod, "SecretNotFound", message)):
        stage.space.make_service(model={key: HUB[key] for key in ("uri", "secretRef")})
        assert message in stage.space.wait_condition("qwen", "Ready", "False", "SecretNotFound")["message"]
        assert not stage.space.condition("qwen", "Stalled"), "it passes when the Secret is there"
