"""The ScaledObject of docs/autoscaling.md, held against KEDA's own definition of it."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.operator.stage import wait_until

from e2e.cluster.api import Api, ApiError
from e2e.cluster.paths import CACHE, REPOSITORY

KEDA = "github.com/kedacore/keda/v2@v2.21.0"
CRD = Path("config", "crd", "bases", "keda.sh_scaledobjects.yaml")
COLLECTION = "/apis/keda.sh/v1alpha1/namespaces/{}/scaledobjects"


@pytest.fixture(scope="session")
def keda(api: Api) -> Api:
    """The API server with ScaledObjects, from KEDA's Go module: about 20 MB, once."""
    environment = os.environ | {"GOMODCACHE": str(CACHE / "keda"), "GOFLAGS": "-modcacherw"}
    done = subprocess.run(["go", "mod", "download", "-json", KEDA], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    crd = yaml.safe_load(Path(json.loads(done.stdout)["Dir"], CRD).read_text())
    api.apply(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd['metadata']['name']}", crd)
    wait_until("ScaledObjects", lambda: api.reachable(COLLECTION.format("default")), 30)
    return api


def read_scaled_object() -> dict[str, Any]:
    page = (REPOSITORY / "docs" / "autoscaling.md").read_text()
    blocks = [block.split("```")[0] for block in page.split("```yaml\n")[1:]]
    (found,) = (body for block in blocks for body in yaml.safe_load_all(block) if body["kind"] == "ScaledObject")
    return dict(found)


def test_the_documented_scaled_object_is_one(keda: Api, namespace: str) -> None:
    path, body = COLLECTION.format(namespace) + "?fieldValidation=Strict", read_scaled_object()
    keda.create(path, body)
    for wrong in ({"triggers": [{"type": "prometheus"}]}, {"scaleTargetRef": {}}, {"most": 4}):
        with pytest.raises(ApiError):
            keda.create(path, body | {"metadata": {"name": "wrong"}, "spec": body["spec"] | wrong})
