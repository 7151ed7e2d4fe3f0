"""What this machine has for engines, and each engine's share of it. Used by `running`."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from conveyor_api import names
from conveyor_api.resource import InferenceService
from conveyor_engine.cgroup import free_memory_bytes, num_cpus
from conveyor_local.errors import RunError

_DEFAULT_FRACTION: Final = 0.85  # of free memory: `kv_memory_fraction` of the engine
_DEFAULT_CAP_BYTES: Final = 4 << 30  # the engine's own limit for a KV cache on a CPU without `kv_memory_fraction`
_GIB: Final = 1 << 30


@dataclass(slots=True)
class Machine:
    """Processors, free memory and the identifiers of the free GPUs. `engines`: the most engines that may run."""

    cpus: int
    free_bytes: int
    gpus: list[str] = field(default_factory=list)
    has_gpus: bool = False
    engines: int = 1

    @property
    def threads(self) -> int:
        """Processor threads of each engine."""
        return max(1, self.cpus // self.engines)

    def take_gpus(self, number: int) -> list[str] | None:
        """Reserve GPUs; None if too few are free."""
        if number > len(self.gpus):
            return None
        taken, self.gpus[:] = self.gpus[:number], self.gpus[number:]
        return taken

    def give_back(self, gpus: Sequence[str]) -> None:
        self.gpus.extend(gpus)

    def find_kv_fraction(self, service: InferenceService) -> float | None:
        """Return the KV cache's share of free memory, so that all engines fit; None if the engine's own is right."""
        cache = service.spec.kv_cache
        if self.has_gpus or self.engines == 1 or cache.block_budget is not None:
            return None
        share = (cache.memory_fraction or _DEFAULT_FRACTION) / self.engines
        if cache.memory_fraction is None and self.free_bytes * share > _DEFAULT_CAP_BYTES:
            return None
        return max(0.01, round(share, 3))

    def describe(self) -> str:
        gpus = f"{len(self.gpus)} GPUs" if self.has_gpus else "no GPU"
        share = f"at most {self.engines} engine{'s' * (self.engines != 1)}, each with {self.threads} of the processors"
        return f"{self.cpus} processors, {self.free_bytes / _GIB:.1f} GiB of free memory, {gpus}; {share}"


def find_machine(environment: Mapping[str, str]) -> Machine:
    gpus = _find_gpus(environment)
    return Machine(num_cpus(), free_memory_bytes(), gpus, bool(gpus))


def count_gpus(service: InferenceService, machine: Machine) -> int:
    """Return how many GPUs an engine of this service gets."""
    spec = service.spec
    uses = machine.has_gpus and (spec.gpus or spec.engine.device == "CUDA")
    return spec.tensor_parallel_size if uses else 0


def check_gpus(services: Sequence[InferenceService], machine: Machine) -> None:
    """Raise RunError if the first engines of all services need more GPUs than there are."""
    needs = {each.key: each.spec.first_replicas * count_gpus(each, machine) for each in services}
    if sum(needs.values()) > len(machine.gpus):
        listed = ", ".join(f"{key} needs {count}" for key, count in needs.items() if count)
        raise RunError(f"too few GPUs: {listed}, and this machine has {len(machine.gpus)} ({names.GPU})", 1)


def _find_gpus(environment: Mapping[str, str]) -> list[str]:
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    program = shutil.which("nvidia-smi")
    if visible is not None:
        return [each.strip() for each in visible.split(",") if each.strip()] if program else []
    if program is None:
        return []
    command = [program, "--query-gpu=index", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.split() if done.returncode == 0 else []
