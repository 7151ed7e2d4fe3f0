"""The asyncio interface to the engine. It admits requests, streams their outputs, aborts them and drains the engine.

Used by `http` and `server`. Owns the `engine_process`. Every opened `Generation` ends exactly once, with a finish
reason or an error, even if the engine process is killed. Contains no HTTP.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import EngineDead, InvalidRequest, ModelError, Overloaded, Unavailable
from conveyor_engine.serving.bill import Bill
from conveyor_engine.serving.engine_process import ENGINE_PROGRAM, Death, EngineProcess
from conveyor_engine.serving.generation import Generation, ReadTurns
from conveyor_engine.serving.held_requests import HELD_TOKENS_MAX_WITH_IMAGES, HeldRequests
from conveyor_engine.serving.places import Places
from conveyor_engine.wire.messages import (
    Abort,
    AdapterFailed,
    AdapterLoaded,
    Drain,
    Failed,
    FromEngine,
    Heartbeat,
    LoadAdapter,
    LoadingLine,
    LoadModel,
    Ready,
    Refused,
    StartFailed,
    StepOutputs,
    UnloadAdapter,
)
from conveyor_engine.wire.request import EngineStats, ModelFacts, RequestOutput
from conveyor_engine.wire.worker import Part
from conveyor_protocol.failure_reasons import FailureReason

HEARTBEAT_LATE_SECONDS = 20.0  # heartbeats come every second, from a thread that needs no device
STEP_STUCK_SECONDS = 120.0  # a step that takes longer is stuck, ...
STEP_STUCK_TIMES = 5  # ... if it also takes this many times as long as the longest warm-up step
PARTS_BATCHES = 2  # batches of one HTTP request's inputs that may be at the engine: the running one and the next one
_log = logging.getLogger(__name__)


class State(StrEnum):
    """The state of the engine as a whole."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class EngineClient:
    """One engine process and the requests that it works on."""

    def __init__(
        self,
        config: EngineConfig,
        on_step: Callable[[StepOutputs], None] = lambda _: None,
        program: str = ENGINE_PROGRAM,
    ) -> None:
        """on_step: called once per engine step, for the metrics."""
        self._config = config
        self._process = EngineProcess(program, config.log_format)
        self._on_step = on_step
        self.state = State.STARTING
        self.facts: ModelFacts | None = None
        self.start_seconds: dict[str, float] = {}  # the seconds that each part of the start took
        self.stats = EngineStats()
        self.death: Death | None = None
        self.dead = asyncio.Event()
        self.idle = asyncio.Event()  # set while no generation is open
        self.idle.set()
        self._turns = ReadTurns()
        self.places = Places(self._max_num_seqs, fills=config.batching_mode in ("static", "dynamic"))
        self._generations: dict[str, Generation] = {}  # by request id, until the last output
        self._held = HeldRequests()
        self._bills: dict[str, Bill] = {}  # by request id, while the engine process has the request
        self._num_sent = self._num_added = self._num_arriving = 0
        self._began = self._last_heartbeat = time.monotonic()
        self._step_seconds = 0.0
        self._stuck_seconds = STEP_STUCK_SECONDS
        self._reading: asyncio.Task[None] | None = None
        self._loading: dict[int, asyncio.Future[None]] = {}  # adapters, by number
        self.on_adapter_lost: Callable[[int, ModelError], None] = lambda *_: None
        """Called when an adapter that was loaded before cannot be loaded again. Nothing else has changed."""

    # --- start and stop ---

    async def start(self) -> None:
        """Start the process and return. Later `state` becomes READY, or it becomes DEAD and `death` is set."""
        self._began = time.monotonic()
        await self._process.start()
        self._process.send(LoadModel(self._config))
        self._last_heartbeat = time.monotonic()
        self._reading = asyncio.create_task(self._read())

    async def stop(self) -> None:
        """End the process. It exits when its socket closes; if it does not exit, it is killed."""
        if self._reading is None:
            return
        self._reading.cancel()  # so that the end of the process is not handled as its death
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading
        await self._process.reap()

    @property
    def is_alive(self) -> bool:
        """Whether heartbeats arrive and no step is stuck. This is true while the model loads."""
        beating = time.monotonic() - self._last_heartbeat < HEARTBEAT_LATE_SECONDS
        return self.state is not State.DEAD and beating and self._step_seconds < self._stuck_seconds

    # --- requests ---

    @property
    def num_open(self) -> int:
        """The number of engine requests that have not had their last output."""
        return len(self._generations)

    @property
    def num_waiting(self) -> int:
        """The number of requests without a place in the batch, including those on their way to the engine."""
        return self.stats.num_waiting + self._num_unread

    @property
    def _num_unread(self) -> int:
        """The number of sent requests, including aborted ones, that the engine has not added yet."""
        return max(0, self._num_sent - self._num_added)

    @contextlib.contextmanager
    def hold_place(self, place_condition: str | None = None) -> Iterator[None]:
        """Reserve a place for a request while a worker validates it. The request already counts as open.

        place_condition: the header X-Engine-Place (`if-free` or `granted`); None for a request without this header.
        Raises Unavailable, Overloaded or NoPlace.
        """
        self.check_state()
        with self.places.reserve(place_condition):
            self._num_arriving += 1
            try:
                self._check_admission(1, 1)
                yield
            finally:
                self._num_arriving -= 1

    def check_state(self) -> None:
        """Raise Unavailable while the engine accepts no requests."""
        if self.state is State.DEAD:
            raise Unavailable("the engine has stopped; this server is about to exit")
        if self.state is not State.READY:
            raise Unavailable(f"the engine is {self.state}")

    def _check_admission(self, num_requests: int, num_tokens: int) -> None:
        """Raise Unavailable or Overloaded if there is no room for what an arriving HTTP request would send."""
        self.check_state()
        others = len(self._held) + self._num_arriving - 1
        if others + num_requests > self.num_requests_max:
            raise Overloaded(f"{others} requests are arriving, waiting or running already; try again later")
        self._held.check_room(num_tokens)

    def open_generation(
        self,
        parts: Sequence[Part],
        timeout_seconds: float,
        place_condition: str | None = None,
        follow: Callable[[RequestOutput], Part | None] = lambda _: None,
    ) -> Generation:
        """Send the parts of an HTTP request to the engine, as many as fit. Call this inside `hold_place`.

        A part is one or more engine requests. The engine has at most `PARTS_BATCHES` batches of engine requests from
        one HTTP request at a time. The next part is sent when there is room again. So an HTTP request with many
        inputs takes turns with other requests, and never fills the engine's queue. After the timeout, all its engine
        requests end with DEADLINE. Raises Unavailable or Overloaded.

        place_condition: as in `hold_place`.

        follow: called with each output before it is read. For a request's last output, it may return a part, which is
        sent to the engine and continues the request.
        """
        num_tokens_of = {name: number for part in parts for name, number in part.num_tokens_of.items()}
        first = _fitting(parts, 0, self._num_at_engine_max)
        self._check_admission(sum(len(part.num_tokens_of) for part in first), sum(num_tokens_of.values()))
        self._held.add(num_tokens_of)
        generation = Generation(
            list(num_tokens_of), timeout_seconds, self.abort, self._turns, follow, adapter=parts[0].adapter
        )
        for request_id in num_tokens_of:
            self._generations[request_id] = generation
        if place_condition is not None:
            self.places.hold(num_tokens_of)
        self.idle.clear()
        generation.unsent.extend(parts)
        self._send_parts(generation)
        return generation

    def _continue(self, generation: Generation, request_id: str, part: Part) -> None:
        """Add the part that continues the request, before the request releases its place."""
        self._held.add(part.num_tokens_of)
        self._generations.update(dict.fromkeys(part.num_tokens_of, generation))
        self.places.join(request_id, part.num_tokens_of)
        generation.add_part(part)

    def _send_parts(self, generation: Generation) -> None:
        """Send those parts of the request for which the engine has room."""
        for part in list(_fitting(generation.unsent, generation.num_at_engine, self._num_at_engine_max)):
            generation.take_part()
            self._held.send(part.num_tokens_of)
            self._bills.update(dict.fromkeys(part.num_tokens_of, generation.bill))
            generation.bill.open(len(part.num_tokens_of))
            self._num_sent += len(part.num_tokens_of)
            self._process.write(part.add)

    @property
    def _num_at_engine_max(self) -> int:
        """The most engine requests of one HTTP request that may be at the engine. A single part may have more."""
        return min(PARTS_BATCHES * self._max_num_seqs, self.num_requests_max)

    def abort(self, request_ids: list[str]) -> None:
        """End these requests. No more outputs come for them."""
        known = [i for i in request_ids if i in self._generations]
        if known and self.state is not State.DEAD:
            self._process.send(Abort(known))
        for generation in {id(g): g for g in map(self._generations.__getitem__, known)}.values():
            for request_id in generation.drop_parts(known):
                self._held.release(request_id)
        for request_id in known:
            self._close(request_id)

    def drain(self) -> None:
        """Reject new requests from now on. Open requests continue."""
        if self.state is State.READY:
            self._process.send(Drain())
        if self.state is not State.DEAD:
            self.state = State.DRAINING
        self.places.close(Unavailable(f"the engine is {self.state}"))

    def fail_all(self, error: Exception) -> None:
        """End every open request with this error."""
        for generation in {id(g): g for g in self._generations.values()}.values():
            generation.fail(error)
            self.abort(generation.request_ids)

    def _close(self, request_id: str) -> None:
        self._generations.pop(request_id, None)
        self.places.release(request_id)
        if not self._generations:
            self.idle.set()

    @property
    def num_requests_max(self) -> int:
        """The maximum number of requests that may be open at a time."""
        return self._config.max_num_queued_requests + self._max_num_seqs

    @property
    def _max_num_seqs(self) -> int:
        return self.facts.max_num_seqs if self.facts else self._config.choose_num_seqs()

    # --- adapters ---

    async def load_adapter(self, number: int, name: str, directory: str) -> None:
        """Load an adapter under a number that no adapter has had. Raises ModelError; nothing has changed then."""
        self._loading[number] = loaded = asyncio.get_running_loop().create_future()
        self._process.send(LoadAdapter(number, name, directory))
        await loaded

    def has_requests(self, adapter: int) -> bool:
        """Return whether an open request has this adapter."""
        return any(each.adapter == adapter for each in self._generations.values())

    def unload_adapter(self, number: int) -> None:
        """Unload an adapter. Requests at the engine go on; later ones are refused."""
        self._process.send(UnloadAdapter(number))

    # --- messages of the engine ---

    async def _read(self) -> None:
        """Handle the engine's messages. When they end, for any reason, the engine is dead."""
        try:
            async for message in self._process.messages():
                self._handle(message)
        except Exception as error:
            _log.exception("event=engine_not_understood")
            text = f"the engine process sent an invalid message: {type(error).__name__}: {error}"
            self.death = Death(FailureReason.ENGINE_ERROR, text)
        self.state = State.DEAD
        self._die(await self._process.reap())

    def _handle(self, message: FromEngine) -> None:
        match message:
            case StepOutputs():
                self._handle_step(message)
            case Heartbeat(step_seconds):
                self._last_heartbeat, self._step_seconds = time.monotonic(), step_seconds
            case Refused():
                self._handle_refusal(message)
            case AdapterLoaded(number):
                self._loading.pop(number).set_result(None)
            case AdapterFailed(number, reason, text):
                error = ModelError(text, reason=reason)
                if number in self._loading:
                    self._loading.pop(number).set_exception(error)
                else:
                    self.on_adapter_lost(number, error)
            case LoadingLine(line):
                _log.info(line)
            case Ready(facts, longest_warmup_step_seconds, warmup_seconds):
                self.facts = facts
                if facts.image_place is not None:
                    self._held.max_tokens = HELD_TOKENS_MAX_WITH_IMAGES
                self.places.batch_size = self._max_num_seqs
                load_seconds = time.monotonic() - self._began - warmup_seconds
                self.start_seconds = {"load": load_seconds, "warm_up": warmup_seconds}
                self._stuck_seconds = max(STEP_STUCK_SECONDS, STEP_STUCK_TIMES * longest_warmup_step_seconds)
                if self.state is State.STARTING:
                    self.state = State.READY
                _log.info(
                    "event=engine_ready max_model_len=%d num_kv_blocks=%d", facts.max_model_len, facts.num_kv_blocks
                )
                if facts.num_lost_graphs:
                    _log.warning(
                        "event=cuda_graphs_lost number=%d consequence=slower_steps "
                        "action=see_the_error_of_cuda_graph_failed", facts.num_lost_graphs,
                    )  # fmt: skip
            case StartFailed(reason, text) | Failed(reason, text):
                self.death = Death(reason, text)

    def _handle_step(self, step: StepOutputs) -> None:
        self.stats, self._num_added, self._step_seconds = step.stats, step.num_added, 0.0
        for output in step.outputs:
            if output.finish_reason is not None:
                self._settle(output.request_id, output)
            generation = self._generations.get(output.request_id)
            if generation is None:
                continue  # aborted here, before the engine received the abort
            part = generation.follow(output)
            generation.put(output)
            if output.finish_reason is not None:
                if part is not None:
                    self._continue(generation, output.request_id, part)
                self._close(output.request_id)
                self._send_parts(generation)
        limit = step.stats.max_running
        self.places.batch_size = self._max_num_seqs if limit is None else limit
        self.places.observe_step(step.stats.num_running)
        self._on_step(step)

    def _settle(self, request_id: str, last: RequestOutput | None = None) -> None:
        """Release an engine request that the engine process has ended with its last output, or has refused."""
        self._held.release(request_id)
        if (bill := self._bills.pop(request_id, None)) is not None:
            bill.close(last)

    def _handle_refusal(self, refused: Refused) -> None:
        self._num_sent -= len(refused.request_ids)
        generation = self._generations.get(refused.request_ids[0])
        for request_id in refused.request_ids:
            self._settle(request_id)
            self._close(request_id)
        if generation is not None:
            overloaded = Overloaded(refused.message)
            invalid = InvalidRequest(refused.message, param=refused.param, code=refused.code)
            generation.fail(overloaded if refused.overloaded else invalid)

    def _die(self, exit_code: int) -> None:
        """Mark the engine as dead and fail every open request."""
        if self.death is None:
            self.death = self._process.explain(exit_code)
        self.places.close(Unavailable(f"the engine is {self.state}"))
        for request_id in list(self._bills):
            self._settle(request_id)
        self.fail_all(EngineDead(f"the engine stopped while working on this request: {self.death.message}"))
        self.dead.set()


def _fitting(parts: Iterable[Part], num_at_engine: int, most: int) -> Iterator[Part]:
    """Yield the next parts, as long as the engine has at most `most` requests of this HTTP request.

    A part with more than `most` requests is sent alone.
    """
    for part in parts:
        if num_at_engine and num_at_engine + len(part.num_tokens_of) > most:
            return
        num_at_engine += len(part.num_tokens_of)
        yield part
