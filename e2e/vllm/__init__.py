"""vLLM for CPUs as a user has it: an image of its own, with nothing of Conveyor, and the service that runs it.

`python -m e2e.vllm` brings the image to the node, of `make vllm` alone: it takes gigabytes.
"""

import hashlib
from pathlib import Path
from typing import Any

DOCKERFILE = Path(__file__).parent / "Dockerfile"
# Nothing of the repository goes into the image, so a node that knows this name has what the Dockerfile says.
IMAGE = f"docker.io/conveyor/vllm-cpu:{hashlib.sha256(DOCKERFILE.read_bytes()).hexdigest()[:12]}"
# GiB of the pod's memory; and its threads are bound to no processors, which two pods share here.
_VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def spec(**engine: Any) -> dict[str, Any]:
    """The parts of a service that runs it."""
    return {
        "runtime": "VLLM",
        "engine": {"image": IMAGE, "maxModelLen": 512, "args": ["--enforce-eager"], **engine},
        "pod": {"env": [{"name": name, "value": value} for name, value in _VARIABLES.items()]},
        # Files of the image that its first start on a node brings into the cache are memory in use to vLLM.
        "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"nvidia.com/gpu": 1, "memory": "6Gi"}},
    }
