"""Children deleted by hand come back, edits of what we own are undone, and nothing is left in the end."""

import json
from typing import Any

from e2e import kube
from e2e.services import quickstart

SELECTOR = "conveyor.dev/inference-service=kept"
ENGINES_OWN = ("deployment", "service", "hpa", "pdb", "serviceaccount")
ASK = "import urllib.request; print(urllib.request.urlopen('http://kept.{namespace}.svc/v1/models').read().decode())"


def test_children_deleted_or_edited_by_hand_are_restored_and_leave_with_their_owner(namespace: str) -> None:
    body = quickstart()
    body["metadata"]["name"] = "kept"
    kube.apply(body, namespace)
    kube.wait_ready("kept", namespace)
    (config,) = (found["metadata"]["name"] for found in kube.list_("configmap", namespace, SELECTOR))
    for kind, name in [*((kind, "kept-engine") for kind in ENGINES_OWN), ("service", "kept"), ("configmap", config)]:
        delete_and_wait(kind, name, namespace)
    edits: list[tuple[str, str, dict[str, Any]]] = [
        ("deployment", "kept-engine", {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 77}}}}),
        ("service", "kept", {"spec": {"externalName": "elsewhere.example"}}),
        ("configmap", config, {"metadata": {"labels": {"app.kubernetes.io/managed-by": "hand"}}}),
    ]
    for kind, name, edit in edits:
        edit_and_wait(kind, name, edit, namespace)
    kube.wait_ready("kept", namespace)
    command = ("exec", "deployment/kept-engine", "-n", namespace, "-c", "engine", "--", "python", "-c")
    answer = json.loads(kube.kubectl(*command, ASK.format(namespace=namespace)))  # by the public Service's name
    assert [model["id"] for model in answer["data"]] == ["kept"]
    kube.kubectl("delete", "infsvc", "kept", "-n", namespace)
    kube.wait_until("nothing is left", lambda: not left(namespace))


def delete_and_wait(kind: str, name: str, namespace: str) -> None:
    uid = observe(kind, name, namespace)["metadata"]["uid"]
    kube.kubectl("delete", kind, name, "-n", namespace, "--wait=false")
    kube.wait_until(f"a new {kind} {name}", lambda: is_new(kind, name, uid, namespace))


def is_new(kind: str, name: str, uid: str, namespace: str) -> bool:
    found = kube.get(kind, name, namespace)
    return found is not None and found["metadata"]["uid"] != uid


def edit_and_wait(kind: str, name: str, edit: dict[str, Any], namespace: str) -> None:
    """Apply `edit`, which changes one field, and wait until the field has its old value again."""
    before = pick(edit, observe(kind, name, namespace))
    kube.kubectl("patch", kind, name, "-n", namespace, "-p", json.dumps(edit))
    kube.wait_until(
        f"the edit of {kind} {name} is undone", lambda: pick(edit, observe(kind, name, namespace)) == before, 60
    )


def observe(kind: str, name: str, namespace: str) -> dict[str, Any]:
    found = kube.get(kind, name, namespace)
    assert found is not None
    return found


def pick(edit: Any, found: Any) -> Any:
    """The field of `found` that `edit` changes."""
    while isinstance(edit, dict):
        ((key, edit),) = edit.items()
        found = found[key]
    assert found is not None
    return found


def left(namespace: str) -> list[str]:
    found = kube.list_("deploy,rs,pods,svc,cm,hpa,pdb,sa,endpointslices", namespace, SELECTOR)
    return [f"{o['kind']}/{o['metadata']['name']}" for o in found]
