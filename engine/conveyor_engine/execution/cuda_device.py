"""Starts CUDA, or explains why it cannot be used here. Called by `machine.choose_device`.

To torch a node without a GPU looks like one whose driver is too old or is not mounted: it sees no device. Its error
tells them apart, and the device files and the driver itself show whether there is a GPU.
"""

import ctypes
import os
import re
from pathlib import Path

import torch

from conveyor_engine.errors import ConfigError
from conveyor_protocol.failure_reasons import FailureReason

OLDEST_CAPABILITY = (8, 0)  # below it bfloat16 is emulated, and the kernels' tiles exceed the shared memory
_OLDEST_DRIVER = {"12": "525", "13": "580"}  # by major version of CUDA: its minor versions all run on that driver
_DEVICE_FILES = Path("/dev"), "nvidia[0-9]*"
_DRIVER_VERSION = Path("/proc/driver/nvidia/version")
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def start() -> str | None:
    """Starts CUDA. Returns the error, torch's own and which driver is needed; None if it has started.

    Raises ConfigError for a GPU that is too old.
    """
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as error:  # an AssertionError if torch was built without CUDA
        return f"{' '.join(str(error).split()).removesuffix('.')}{_driver_needed()}"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < OLDEST_CAPABILITY:
        raise ConfigError(
            f"the GPU is of type {torch.cuda.get_device_name()} with compute capability {major}.{minor}, and this "
            "engine needs 8.0 or newer: choose nodes with a GPU of NVIDIA's Ampere generation or a later one",
            reason=FailureReason.NO_DEVICE,
        )
    return None


def is_present() -> bool:
    """Whether there is a GPU that CUDA_VISIBLE_DEVICES does not hide, or a driver that failed before it could tell."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    folder, pattern = _DEVICE_FILES
    return any(folder.glob(pattern)) or _init_driver() not in (None, _NO_DEVICE)


def _init_driver() -> int | None:
    """What the driver's library answers to cuInit, 0 if all is well; None if there is no such library."""
    try:
        return int(ctypes.CDLL("libcuda.so.1").cuInit(0))
    except (OSError, AttributeError):
        return None


def _driver_needed() -> str:
    cuda = torch.version.cuda
    oldest = _OLDEST_DRIVER.get((cuda or "").partition(".")[0])
    if oldest is None:
        return ""
    return f"; torch {torch.__version__} needs NVIDIA's driver {oldest} or newer, {_driver_found()}"


def _driver_found() -> str:
    try:
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", _DRIVER_VERSION.read_text())
    except OSError:
        found = None
    return f"and this node has {found[0]}" if found else "and this node shows none"
