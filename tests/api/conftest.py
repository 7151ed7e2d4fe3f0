"""The committed CRD on a real API server, and the calls that the tests of the API make."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from conveyor_api import names
from e2e.cluster.api import Api, ApiError, wait_until
from e2e.cluster.control_plane import ControlPlane

Json = dict[str, Any]
REPOSITORY = Path(__file__).resolve().parents[2]


class Services:
    """InferenceServices of one namespace. Unknown fields are refused, as with kubectl."""

    def __init__(self, api: Api, namespace: str, group: str = names.GROUP) -> None:
        self._api = api
        self._path = f"/apis/{group}/{names.VERSION}/namespaces/{namespace}/{names.PLURAL}"

    def create(self, body: Json) -> Json:
        return self._api.create(f"{self._path}?fieldValidation=Strict", body)

    def would_create(self, body: Json) -> bool:
        """Whether `create` would be accepted."""
        try:
            self._api.create(f"{self._path}?fieldValidation=Strict&dryRun=All", body)
        except ApiError:
            return False
        return True

    def get(self, name: str, subresource: str = "") -> Json:
        return self._api.get(f"{self._path}/{name}{subresource}")

    def merge(self, name: str, change: Json, subresource: str = "") -> Json:
        """A merge patch."""
        path = f"{self._path}/{name}{subresource}?fieldValidation=Strict"
        return self._api.call("PATCH", path, change, "application/merge-patch+json")


def install(api: Api, crd: Json) -> None:
    """Apply `crd` and wait until its resources are served."""
    api.apply(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd['metadata']['name']}", crd)
    path = f"/apis/{crd['spec']['group']}/{names.VERSION}/{names.PLURAL}"
    wait_until("the CRD", lambda: api.reachable(path))


@pytest.fixture(scope="session")
def api(control_plane: ControlPlane) -> Api:
    return Api(control_plane.kubeconfig)


@pytest.fixture(scope="session")
def crd(api: Api) -> Json:
    crd: Json = yaml.safe_load((REPOSITORY / "crds" / f"{names.CRD_NAME}.yaml").read_text(encoding="utf-8"))
    install(api, crd)
    return crd


@pytest.fixture
def services(api: Api, crd: Json, namespace: str) -> Services:
    return Services(api, namespace)


@pytest.fixture(scope="session")
def services_in_default(api: Api, crd: Json) -> Services:
    """For tests that create nothing."""
    return Services(api, "default")
