"""A release from a registry: the chart is installed by its digest, and nodes pull its images by theirs.

After the story, the chart has the images of `make deploy` again.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e import kube
from e2e.cluster import buildah, kind
from e2e.cluster.images import IMAGES
from e2e.deploy import install, wait_registered
from e2e.release import tools
from e2e.release.publishing import Key, Release, publish, verify
from e2e.release.registry import running_registry
from e2e.services import quickstart
from e2e.test_modes import chat

pytestmark = [pytest.mark.alone, pytest.mark.nightly]


@pytest.fixture
def release(tmp_path: Path) -> Iterator[Release]:
    """The published images and chart. Their registry is on the node's own localhost."""
    if kube.current_context() == kind.CONTEXT:
        pytest.skip("a node of kind reaches no registry on this machine's localhost")
    tools.build()
    images = {name: buildah.source(image.name) for name, image in IMAGES.items()}
    key = Key.generate(tmp_path)
    for name in images:
        (tmp_path / f"{name}.cdx.json").write_text('{"bomFormat": "CycloneDX", "specVersion": "1.5"}')
    with running_registry(tmp_path) as registry:
        published = publish(registry, images, tmp_path, key, tmp_path)
        verify(published, key)
        yield published
        install()


@pytest.mark.timeout(1800)
def test_a_service_runs_from_a_chart_and_images_that_a_registry_has(release: Release, namespace: str) -> None:
    at = ("--namespace", kube.SYSTEM_NAMESPACE)
    kube.helm("upgrade", "conveyor", f"oci://{release.chart}", *at, "--plain-http", "--wait", "--timeout", "300s")
    wait_registered()
    kube.apply(quickstart(), namespace)
    name = quickstart()["metadata"]["name"]
    kube.wait_ready(name, namespace)
    assert chat(name, namespace)
    pods = [*kube.list_("pods", kube.SYSTEM_NAMESPACE), *kube.list_("pods", namespace)]
    staying = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    images = {container["image"] for pod in staying for container in pod["spec"]["containers"]}
    assert images == {release.control, release.engine}
