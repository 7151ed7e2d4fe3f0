"""Children deleted by hand come back, edits of what we own are undone, and nothing is left in the end."""

import json

from e2e import kube
from e2e.services import quickstart

KINDS = ("deployment", "service", "hpa", "pdb", "serviceaccount")


def test_children_deleted_or_edited_by_hand_are_restored_and_leave_with_their_owner(namespace: str) -> None:
    body = quickstart()
    body["metadata"]["name"] = "kept"
    kube.apply(body, namespace)
    kube.wait_ready("kept", namespace)
    for kind in KINDS:
        uid = kube.get(kind, "kept-engine", namespace)["metadata"]["uid"]
        kube.kubectl("delete", kind, "kept-engine", "-n", namespace, "--wait=false")
        kube.wait_until(f"a new {kind}", lambda kind=kind, uid=uid: is_new(kind, uid, namespace), 60)
    edit = {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 77}}}}
    kube.kubectl("patch", "deployment", "kept-engine", "-n", namespace, "-p", json.dumps(edit))
    kube.wait_until("the edit is undone", lambda: grace_seconds(namespace) != 77, 60)
    kube.wait_ready("kept", namespace)
    kube.kubectl("delete", "infsvc", "kept", "-n", namespace)
    kube.wait_until("nothing is left", lambda: not left(namespace), 180)


def is_new(kind: str, uid: str, namespace: str) -> bool:
    found = kube.get(kind, "kept-engine", namespace)
    return found is not None and found["metadata"]["uid"] != uid


def grace_seconds(namespace: str) -> int:
    deployment = kube.get("deployment", "kept-engine", namespace)
    assert deployment is not None
    return int(deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"])


def left(namespace: str) -> list[str]:
    selector = "conveyor.dev/inference-service=kept"
    found = kube.list_("deploy,rs,pods,svc,cm,hpa,pdb,sa,endpointslices", namespace, selector)
    return [f"{o['kind']}/{o['metadata']['name']}" for o in found]
