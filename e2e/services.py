"""What the stories and the demo deploy: the demo model's claim, and InferenceServices over it."""

from pathlib import Path
from typing import Any

import yaml

from e2e import kube
from e2e.cluster.volumes import host_path_claim

CLAIM = "models"


def provide_namespace(name: str) -> None:
    """A namespace in which a pod that breaks the restricted Pod Security Standard is refused."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})


def provide_demo_model(namespace: str) -> None:
    """A claim `models` in the namespace that holds the demo model in its folder `demo`."""
    from e2e.demo_model import demo_model_directory

    kube.apply(host_path_claim(namespace, CLAIM, str(demo_model_directory().parent)))


def remove_demo_model(namespace: str) -> None:
    """Delete the volume behind the claim. The caller deletes the claim or its namespace. The folder stays."""
    kube.kubectl("delete", "pv", f"{namespace}-{CLAIM}", "--ignore-not-found", "--wait=false")


def quickstart() -> dict[str, Any]:
    """The README's InferenceService, as a body to change."""
    body: dict[str, Any] = yaml.safe_load(Path(kube.MANIFESTS / "quickstart.yaml").read_text())
    return body


def service(name: str, **spec: Any) -> dict[str, Any]:
    """The quickstart under another name, fixed at one replica, with these parts of the spec replaced."""
    body = quickstart()
    body["metadata"]["name"] = name
    del body["spec"]["autoscaling"]
    body["spec"].update(spec)
    return body
