"""Describes what a stage's figures were measured on: device, driver, versions and commit. Called by `stage`."""

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[3]
_NVIDIA_SMI = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]


def describe(commit: str | None) -> dict[str, str]:
    """Return the description. commit: replaces git's answer, for a copy of the repository without a git folder."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": commit or _read_output(["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]),
        "device": _describe_device(),
        "driver": _read_output(_NVIDIA_SMI),
        "CUDA": str(torch.version.cuda),
        "cores": str(os.cpu_count()),
        "load": f"{os.getloadavg()[0]:.1f}",
        "Python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "triton", "transformers", "msgspec")},
    }


def _describe_device() -> str:
    if not torch.cuda.is_available():
        return "CPU"
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} SMs"


def _read_output(command: list[str]) -> str:
    """Return the first line that the command prints; "unknown" if it fails."""
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return output.splitlines()[0] if output else "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
