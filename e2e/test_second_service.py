"""docs/second-service.md's commands, verbatim but for what this cluster has not: a GPU, and the internet's hub."""

import os
from pathlib import Path

import pytest

from e2e import kube
from e2e.cluster import kind
from e2e.cluster.volumes import host_path_claim
from e2e.demo_model import demo_model_directory
from e2e.hub_of_demo import running_hub
from e2e.test_quickstart import commands, shell

PAGE = "docs/second-service.md"


@pytest.mark.nightly
@pytest.mark.long
def test_the_page_on_a_second_service_ends_with_two_of_them(tmp_path: Path) -> None:
    if kube.current_context() == kind.CONTEXT:
        provide_volume()
    try:
        with running_hub(tmp_path) as hub:
            variable = f"{{name: HF_ENDPOINT, value: {hub.url}}}"
            for block in commands(PAGE):
                adapted = f"{{maxModelLen: 512, device: Auto}}\n  pod: {{env: [{variable}]}}"
                here = block.replace("{maxModelLen: 4096}", adapted)
                out = shell(here.replace("{name: HOME, value: /tmp}", f"{{name: HOME, value: /tmp}}, {variable}"))
                if "curl" in block:
                    assert '"object":"chat.completion"' in out.replace(" ", "")
                    assert "Events:" in shell("kubectl -n team-a describe infsvc chat")
    finally:
        kube.kubectl("delete", "namespace", "team-a", "--ignore-not-found", "--timeout=300s", timeout_seconds=320)
        kube.kubectl("delete", "pv", "team-a-models", "--ignore-not-found", "--wait=false")


def provide_volume() -> None:
    """Create what a storage class would for the page's claim. kind's class refuses ReadWriteMany."""
    folder = demo_model_directory().parent / "team-a"
    folder.mkdir(exist_ok=True)
    os.chmod(folder, 0o777)
    volume = host_path_claim("team-a", "models", str(folder))[0]
    volume["spec"]["storageClassName"] = default_storage_class()
    kube.apply(volume)


def default_storage_class() -> str:
    mark = "storageclass.kubernetes.io/is-default-class"
    found = [c["metadata"] for c in kube.list_("storageclasses", "default")]
    return next((c["name"] for c in found if (c.get("annotations") or {}).get(mark) == "true"), "")
