"""Fixtures every test may ask for: a real control plane, started once per session or xdist worker, and a namespace."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import yaml

if shutil.which("nvidia-smi") is None:
    # Triton decides when it is first imported, by whichever test that is, whether its kernels are interpreted.
    os.environ["TRITON_INTERPRET"] = "1"

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `e2e` is no installed package

from conveyor_api import names
from e2e.cluster.api import Api, wait_until
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.paths import REPOSITORY


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    with ControlPlane(hpa_sync_period_seconds=1, hpa_downscale_stabilization_seconds=2) as started:
        yield started


@pytest.fixture(scope="session")
def kubeconfig(control_plane: ControlPlane) -> Path:
    return control_plane.kubeconfig


@pytest.fixture(scope="session")
def crd(control_plane: ControlPlane) -> Api:
    """The control plane with InferenceServices served."""
    api = Api(control_plane.kubeconfig)
    definition = yaml.safe_load((REPOSITORY / "crds" / f"{names.CRD_NAME}.yaml").read_text(encoding="utf-8"))
    api.apply(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{names.CRD_NAME}", definition)
    path = f"/apis/{names.API_VERSION}/{names.PLURAL}"
    wait_until("the CRD", lambda: api.reachable(path), 20, lambda: None)
    return api


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """Name of a fresh namespace; what is in it goes with it, in the background."""
    api, name = Api(control_plane.kubeconfig), f"test-{uuid4().hex[:8]}"
    api.create("/api/v1/namespaces", {"metadata": {"name": name}})
    yield name
    api.delete(f"/api/v1/namespaces/{name}")
