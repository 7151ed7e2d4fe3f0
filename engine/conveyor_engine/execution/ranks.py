"""Runs one model on several devices. Each rank is a process that runs the same steps on its part of the model.

Used by `build` in the engine process, which is rank 0. Every other rank is a `rank_process`. Rank 0 sends every plan
and every mask to all other ranks. The ranks add up their results inside the forward pass (`models.divide`) and choose
the same tokens, so only those of rank 0 are read. If a rank ends, the engine ends too, because the other ranks would
wait for it in the middle of a step.
"""

import contextlib
import logging
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from conveyor_engine.cgroup import count_oom_kills, explain_exit
from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.wire.frames import encode_frame, read_payloads
from conveyor_engine.wire.ranks import BeginStep, LoadRank, RankFailed, SampleStep, ToRank, from_rank_decoder
from conveyor_engine.wire.step import RowMask, StepPlan, StepResult
from conveyor_protocol.failure_reasons import FailureReason

Fail = Callable[[FailureReason, str], None]  # ends the engine process; called in a thread, and does not return

_PROGRAM: Final = "conveyor_engine.execution.rank_process"
_log = logging.getLogger(__name__)


class Ranks:
    """The processes of all ranks other than 0."""

    def __init__(self, config: EngineConfig, fail: Fail) -> None:
        """Start the processes. `fail` is called if one of them ends."""
        self.world_size = config.tensor_parallel_size
        self._folder = tempfile.TemporaryDirectory(prefix="conveyor-ranks-")
        self.meeting = str(Path(self._folder.name) / "meeting")  # a file through which the ranks find each other
        self._fail = fail
        self._oom_kills_before = count_oom_kills()
        self._ends: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, self.world_size):
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-m", _PROGRAM, "--fd", str(theirs.fileno())]
                process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            self._ends.append(ours)
            self._processes.append(process)
            _log.info("event=rank_started rank=%d pid=%d", rank, process.pid)
            threading.Thread(target=self._watch, args=(rank, ours, process), name=f"rank {rank}", daemon=True).start()
            ours.sendall(encode_frame(LoadRank(config, rank, self.meeting)))

    def send(self, message: ToRank) -> None:
        """Send the message to all other ranks. Ignores ranks that are gone, because these end the engine soon."""
        frame = encode_frame(message)
        with contextlib.suppress(OSError):
            for end in self._ends:
                end.sendall(frame)

    def stop(self) -> None:
        """End the processes, for a program that continues without them."""
        self._fail = lambda *_: None
        for end, process in zip(self._ends, self._processes, strict=True):
            end.shutdown(socket.SHUT_RDWR)
            process.wait()
            end.close()
        self._folder.cleanup()

    def _watch(self, rank: int, end: socket.socket, process: "subprocess.Popen[bytes]") -> None:
        failed: RankFailed | None = None
        with contextlib.suppress(OSError), end.makefile("rb") as stream:
            failed = next(map(from_rank_decoder.decode, read_payloads(stream)), None)
        if failed is None:
            name = f"the process of rank {rank} of {self.world_size}"
            failed = RankFailed(*explain_exit(name, process.wait(), self._oom_kills_before))
        self._fail(failed.reason, failed.message)


class RankedRunner:
    """A `loop.executor.Executor` that runs rank 0's runner and makes the other ranks run the same steps."""

    def __init__(self, runner: Any, ranks: Ranks) -> None:
        self._runner = runner
        self._ranks = ranks
        self.facts = runner.facts
        self.extra_warmup_tokens: Sequence[int] = runner.extra_warmup_tokens
        self.graph_sizes: Sequence[int] = runner.graph_sizes

    def begin(self, plan: StepPlan) -> Callable[[Sequence[RowMask]], Callable[[], StepResult]]:
        """Begin a step, as `Executor.begin` does."""
        self._ranks.send(BeginStep(plan))
        return partial(self._sample, self._runner.begin(plan))

    def _sample(
        self, sample: Callable[[Sequence[RowMask]], Callable[[], StepResult]], masks: Sequence[RowMask]
    ) -> Callable[[], StepResult]:
        self._ranks.send(SampleStep(list(masks)))
        return sample(masks)

    def free_memory(self) -> None:
        """Raise RuntimeError: after a failed step, the ranks are no longer at the same point of the model."""
        raise RuntimeError(f"a step failed in rank 0 of {self._ranks.world_size}, and the other ranks wait in it")
