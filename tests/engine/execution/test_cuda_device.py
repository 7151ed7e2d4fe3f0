"""Checks that a GPU that cannot be used is reported with CUDA's error and the solution, and not replaced by the CPU."""

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conveyor_engine.config.engine_config import Device
from conveyor_engine.errors import ConfigError
from conveyor_engine.execution import machine
from conveyor_engine.execution.machine import choose_device

NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU."
OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 12020).\nPlease update your GPU driver."
NO_GPUS = "No CUDA GPUs are available"
DEVICES: tuple[Device, ...] = ("auto", "cuda")


class Node:
    """The parts of a node that an engine can see: device files, the driver's library and version, and CUDA's error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._monkeypatch, self._folder = monkeypatch, folder
        monkeypatch.setattr(machine, "_DEVICE_FILES", (folder, "nvidia[0-9]*"))
        monkeypatch.setattr(machine, "_DRIVER_VERSION", folder / "version")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.version, "cuda", "13.2")
        monkeypatch.setattr(torch, "__version__", "2.15.0")

    def has_device_file(self) -> None:
        (self._folder / "nvidia0").touch()

    def has_driver(self, version: str, cu_init: int) -> None:
        (self._folder / "version").write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Wed\n")
        self._monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(cuInit=lambda _: cu_init))

    def cuda_fails(self, error: str, kind: type[Exception] = RuntimeError) -> None:
        def fail() -> None:
            raise kind(error)

        self._monkeypatch.setattr(torch.cuda, "init", fail)

    def has_gpu(self, name: str, capability: tuple[int, int]) -> None:
        self._monkeypatch.setattr(torch.cuda, "init", lambda: None)
        self._monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        self._monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Node:
    """Return a node without GPU and driver."""

    def load(_: str) -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    made = Node(monkeypatch, tmp_path)
    made.cuda_fails(NO_DRIVER)
    return made


def refusal(device: Device) -> str:
    with pytest.raises(ConfigError) as caught:
        choose_device(device)
    assert caught.value.reason == "NoDevice"
    return str(caught.value)


def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused_with_its_error(node: Node) -> None:
    assert choose_device("auto") == torch.device("cpu")
    message = refusal("cuda")
    assert "no CUDA device is visible here; ask for a GPU" in message
    assert NO_DRIVER.removesuffix(".") in message
    assert "needs NVIDIA's driver 580 or newer" in message


def test_the_cpu_is_taken_without_a_look_at_cuda(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: pytest.fail("CUDA is started"))
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_an_old_driver_is_named_with_the_one_that_is_needed(node: Node, device: Device) -> None:
    node.has_driver("535.104.05", cu_init=0)
    node.cuda_fails(OLD_DRIVER)
    message = refusal(device)
    assert "too old (found version 12020). Please update" in message
    assert "torch 2.15.0 needs NVIDIA's driver 580 or newer, and this node has 535.104.05" in message


@pytest.mark.parametrize("device", DEVICES)
def test_a_driver_that_does_not_start_is_an_error(node: Node, device: Device) -> None:
    """802: a machine with several GPUs whose fabric manager does not run."""
    node.has_driver("580.65.06", cu_init=802)
    node.cuda_fails("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized")
    assert "CUDA cannot start: Unexpected error from cudaGetDeviceCount()" in refusal(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("error", "kind"),
    [(NO_DRIVER, RuntimeError), (NO_GPUS, RuntimeError), ("Torch not compiled with CUDA enabled", AssertionError)],
)
def test_a_gpu_that_torch_does_not_see_is_an_error(
    node: Node, device: Device, error: str, kind: type[Exception]
) -> None:
    """Its driver is not mounted or not found, it has no MIG instance, or this torch has no CUDA."""
    node.has_device_file()
    node.cuda_fails(error, kind)
    assert f"there is a GPU, but CUDA cannot start: {error.removesuffix('.')}" in refusal(device)


def test_a_driver_without_a_gpu_leaves_auto_on_the_cpu(node: Node) -> None:
    node.has_driver("580.65.06", cu_init=100)
    node.cuda_fails(NO_GPUS)
    assert choose_device("auto") == torch.device("cpu")


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_gpu_that_is_hidden_on_purpose_leaves_auto_on_the_cpu(
    node: Node, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    node.has_device_file()
    node.cuda_fails(NO_GPUS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert choose_device("auto") == torch.device("cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "capability"), [("Tesla T4", (7, 5)), ("Tesla V100", (7, 0))])
def test_a_gpu_below_8_0_is_refused(node: Node, device: Device, name: str, capability: tuple[int, int]) -> None:
    node.has_gpu(name, capability)
    message = refusal(device)
    assert name in message
    assert f"compute capability {'.'.join(map(str, capability))}, and this engine needs 8.0 or newer" in message


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_a_gpu_from_8_0_on_is_taken(node: Node, device: Device, capability: tuple[int, int]) -> None:
    node.has_gpu("one", capability)
    assert choose_device(device) == torch.device("cuda")
