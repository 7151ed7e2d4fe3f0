"""Fixtures for all tests: a real control plane, which is started once per session or xdist worker, and a namespace."""

import atexit
import gc
import logging
import os
import shutil
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from conveyor_engine.openmp import spin_briefly

if shutil.which("nvidia-smi") is None:
    # Triton decides when it is first imported, by whichever test that is, whether its kernels are interpreted.
    os.environ["TRITON_INTERPRET"] = "1"

# Workers share the CPUs. torch's threads read it when they are loaded.
os.environ.update(spin_briefly(os.environ))

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `e2e` is no installed package

from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions

# Files that share what takes long to start run in one worker: the start of their paths, and what they share.
TOGETHER = {
    "tests/engine/serving/http/": "server",
    "tests/engine/serving/preparing/test_fields.py": "server",
    "tests/metrics/": "metrics_plane",
}


class _Scheduling(LoadFileScheduling):
    """Lets every second worker begin at the end, where the tests are that wait more than they compute."""

    def _split_scope(self, nodeid: str) -> str:
        shared = (what for start, what in TOGETHER.items() if nodeid.startswith(start))
        return next(shared, super()._split_scope(nodeid))

    def _assign_work_unit(self, node: Any) -> None:
        if int(node.gateway.id.removeprefix("gw")) % 2:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freeze imported modules and collected tests, so that the garbage collector skips them.

    This saves a tenth of the time.
    """
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


# All of it goes at the end: Triton's binding prints what it would leave behind.
atexit.register(gc.unfreeze)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return _Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Put files that need the control plane last, because it costs two seconds per minute when it is idle."""
    needing = {item.path for item in items if "control_plane" in item.fixturenames}
    items.sort(key=lambda item: item.path in needing)


# An example takes as long as the machine lets it.
settings.register_profile("any-machine", settings(), deadline=None)
settings.load_profile("any-machine")


@pytest.fixture(autouse=True)
def log_stays_as_it_was() -> Iterator[None]:
    """Restore the process's log after a test. A test may configure it with a standard error that ends with the test."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = [handler for handler in logging.root.handlers if handler in handlers]
    logging.root.setLevel(level)
    logging.captureWarnings(False)


@pytest.fixture(autouse=True)
def signals_are_handled_as_before() -> Iterator[None]:
    """Restore the signal handlers after a test, for later tests. uvloop, for example, does not remove its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    with ControlPlane(hpa_sync_period_seconds=1, hpa_downscale_stabilization_seconds=2) as started:
        yield started


@pytest.fixture(scope="session")
def kubeconfig(control_plane: ControlPlane) -> Path:
    return control_plane.kubeconfig


@pytest.fixture(scope="session")
def crd(control_plane: ControlPlane) -> Api:
    """The control plane with Conveyor's kinds, which gateways need to become ready."""
    api = Api(control_plane.kubeconfig)
    install_definitions(api)
    return api


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """The name of a new namespace. It is not deleted, because that takes longer than most tests.

    Its autoscalers are deleted, because the controllers evaluate each of them every second.
    """
    api, name = Api(control_plane.kubeconfig), f"test-{uuid4().hex[:8]}"
    api.create("/api/v1/namespaces", {"metadata": {"name": name}})
    yield name
    api.delete(f"/apis/autoscaling/v2/namespaces/{name}/horizontalpodautoscalers")
