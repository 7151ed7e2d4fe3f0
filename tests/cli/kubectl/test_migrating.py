"""Tests `kubectl conveyor migrate` on a real API server. The CRDs get a second version and then lose the first one."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from tests.operator.stage import Space, make_service, wait_until

from conveyor_api import names
from conveyor_kubectl import migrating
from conveyor_kubectl.cluster import Cluster, Refused
from conveyor_kubectl.command import main
from e2e.cluster.api import Api, ApiError
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import claim_name, install_definitions
from e2e.cluster.paths import REPOSITORY

NEXT = "v1beta1"
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    with ControlPlane() as started:
        install_definitions(Api(started.kubeconfig))
        yield started


def install(api: Api, *versions: str) -> None:
    """Install both CRDs with these versions, the last of which is stored. Returns when the API server serves them."""
    for name in migrating.CRD_NAMES:
        crd = yaml.safe_load((REPOSITORY / "crds" / f"{name}.yaml").read_text())
        (first,) = crd["spec"]["versions"]
        crd["spec"]["versions"] = [
            copy.deepcopy(first) | {"name": version, "storage": version == versions[-1]} for version in versions
        ]
        api.apply(f"{_CRDS}/{name}", crd)
        wait_served(api, f"/apis/{names.GROUP}/{versions[-1]}/{crd['spec']['names']['plural']}")


def wait_served(api: Api, path: str) -> None:
    wait_until(path, lambda: api.reachable(path))


def stored(api: Api, name: str = names.CRD_NAME) -> list[str]:
    found: list[str] = api.get(f"{_CRDS}/{name}")["status"]["storedVersions"]
    return found


def read(api: Api, version: str) -> dict[str, Any]:
    path = f"/apis/{names.GROUP}/{version}/{names.PLURAL}"
    wait_served(api, path)  # a CRD that has just changed is not served for a moment
    items = api.get(path)["items"]
    return {item["metadata"]["name"]: item for item in items}


def expire_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the API server's list expire once, as it does after minutes: the second page then cannot be read."""
    get, expirations = Cluster.get, [Refused(410, "The provided continue parameter is too old")]

    def get_or_expire(cluster: Cluster, path: str, *query: dict[str, str]) -> Any:
        if expirations and any("continue" in each for each in query):
            raise expirations.pop()
        return get(cluster, path, *query)

    monkeypatch.setattr(Cluster, "get", get_or_expire)


def test_a_version_can_be_removed_after_a_migration(
    plane: ControlPlane, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    api, command = Api(plane.kubeconfig), ["migrate", f"--kubeconfig={plane.kubeconfig}"]
    space = Space(api, "default")
    for number in range(migrating._PAGE_OBJECTS + 5):
        space.create("InferenceService", make_service(f"qwen-{number}"))
    claim_name(api, "default", "qwen")
    assert main(command) == 0
    assert "inferenceservices: all are stored in v1alpha1, nothing to do" in capsys.readouterr().out

    install(api, names.VERSION, NEXT)
    assert stored(api) == [names.VERSION, NEXT]
    with pytest.raises(ApiError, match="storedVersions"):
        install(api, NEXT)
    before = read(api, NEXT)
    expire_once(monkeypatch)
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "inferenceservices: 100 written" in told
    assert "inferenceservices: 105 are stored in v1beta1; v1alpha1 can be removed from the CRD" in told
    assert [stored(api, name) for name in migrating.CRD_NAMES] == [[NEXT], [NEXT]]

    install(api, NEXT)
    after = read(api, NEXT)
    assert {name: item["spec"] for name, item in after.items()} == {n: item["spec"] for n, item in before.items()}
    assert {item["metadata"]["generation"] for item in after.values()} == {1}, "nothing has to be reconciled"


def test_objects_that_may_not_be_written_keep_their_version(
    plane: ControlPlane, capsys: pytest.CaptureFixture[str]
) -> None:
    api = Api(plane.kubeconfig)
    install(api, NEXT, "v1")
    role, reader = {"metadata": {"name": "reader"}}, plane.issue_kubeconfig("reader", "reader")
    crds = {"apiGroups": ["apiextensions.k8s.io"], "resources": ["customresourcedefinitions"], "verbs": ["get"]}
    objects = {"apiGroups": [names.GROUP], "resources": ["*"], "verbs": ["list"]}
    root = "/apis/rbac.authorization.k8s.io/v1"
    api.create(f"{root}/clusterroles", role | {"rules": [crds, objects]})
    of = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "reader"}
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "reader"}
    api.create(f"{root}/clusterrolebindings", role | {"roleRef": of, "subjects": [subject]})

    def told() -> str:
        assert main(["migrate", f"--kubeconfig={reader}"]) == 1
        return capsys.readouterr().out

    wait_until("the role is in force", lambda: "default/qwen-7 is not written: " in told())
    assert stored(api) == [NEXT, "v1"]
    assert main(["migrate", f"--kubeconfig={plane.kubeconfig}"]) == 0
    assert stored(api) == ["v1"]
