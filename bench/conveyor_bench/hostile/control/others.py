"""Measures operator and metrics server as another namespace's user, in a separate process, beside a hostile tenant.

`hostile.others` starts this process for the command. The process creates one InferenceService after the other and waits
for each Deployment, reads an autoscaler's metric through the API server, and calls the probes. It has no attack and no
bar.
"""

import contextlib
import itertools
import json
import sys
import threading
import time
import urllib.request
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.operator.stage import Space, make_service

from conveyor_api import names
from conveyor_bench.hostile.bars import NEVER
from e2e.cluster.api import Api

LONGEST_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Targets:
    """What to measure. `probes` are URLs; `value` is the API server's path of the autoscaler's metric."""

    kubeconfig: str
    namespace: str
    probes: list[str]
    value: str


@dataclass(slots=True)
class Taken:
    """Times in seconds; infinite if the answer was not 200, or there was no Deployment after a minute."""

    reconciles: list[float] = field(default_factory=list)
    probes: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


class Measurement:
    """A measurement from one line of the standard input to the next."""

    def __init__(self, targets: Targets, numbers: "itertools.count[int]") -> None:
        self._targets, self._numbers = targets, numbers
        self._ended = threading.Event()
        self.taken = Taken()
        measures = (self._create_services, self._read_values, self._call_probes)
        self._threads = [threading.Thread(target=measure, daemon=True) for measure in measures]
        for thread in self._threads:
            thread.start()

    def end(self) -> Taken:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        return self.taken

    def _create_services(self) -> None:
        space = Space(Api(Path(self._targets.kubeconfig)), self._targets.namespace)
        while not self._ended.wait(0.1):
            name = f"new-{next(self._numbers)}"
            began = time.perf_counter()
            space.create("InferenceService", make_service(name, replicas=0))
            while (waited := time.perf_counter() - began) < LONGEST_SECONDS:
                if space.get("Deployment", names.engine_name(name)) is not None:
                    break
                time.sleep(0.01)
            self.taken.reconciles.append(waited if waited < LONGEST_SECONDS else NEVER)
            space.delete("InferenceService", name)

    def _read_values(self) -> None:
        api = Api(Path(self._targets.kubeconfig))
        while not self._ended.wait(0.1):
            began = time.perf_counter()
            answered = api.reachable(self._targets.value)
            self.taken.values.append(time.perf_counter() - began if answered else NEVER)

    def _call_probes(self) -> None:
        while not self._ended.wait(0.2):
            for url in self._targets.probes:
                began, status = time.perf_counter(), 0
                with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
                    status = answer.status
                self.taken.probes.append(time.perf_counter() - began if status == 200 else NEVER)


def measure(targets: Targets) -> None:
    numbers = itertools.count()
    while True:
        measurement = Measurement(targets, numbers)
        line = sys.stdin.readline()
        taken = measurement.end()
        if not line:
            break
        print(json.dumps(asdict(taken)), flush=True)


if __name__ == "__main__":
    measure(Targets(**json.loads(sys.argv[1])))
