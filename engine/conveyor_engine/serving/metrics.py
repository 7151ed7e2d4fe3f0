"""Keeps the metrics of requests and steps, and renders all metrics of the engine for /metrics.

`http` updates the metrics of requests, and `engine_client` calls `observe_step` after each step. Metrics that are
computed at a scrape are in `metrics_snapshot` and `adapter_metrics`.

Metrics that vLLM also has keep vLLM's names (vllm:* and http_requests), for dashboards, gateways and load generators.
The names of the others begin with conveyor_engine_.
"""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest

from conveyor_engine.serving.adapter_metrics import AdapterMetrics
from conveyor_engine.serving.metrics_snapshot import Counts, Snapshot
from conveyor_engine.serving.step_log import StepLog
from conveyor_engine.wire.messages import StepOutputs
from conveyor_engine.wire.request import FinishReason
from conveyor_protocol.engine_pages import ADAPTERS_PATH, LOAD_PATH, PLACE_PATH, STEPS_PATH, USAGE_PATH
from conveyor_protocol.open_inference import LIVE_PATH, READY_PATH, SERVER_PATH

disable_created_metrics()  # type: ignore[no-untyped-call]
_FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_BETWEEN_TOKENS_SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST_SECONDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_POWERS_OF_TWO = tuple(2**power for power in range(15))
_BATCH_WAIT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 3600)
_COSTS = tuple(4**power for power in range(13))
_SHARES = (0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
_PREEMPTIONS = (0, 1, 2, 3, 4, 5, 10, 20)
_METHODS = {"GET", "POST", "DELETE", "HEAD", "OPTIONS"}  # others share one label, because clients can send any word
# http_requests does not count probes and scrapes, as in vLLM. They nearly always succeed, and would hide failures.
_NOT_REQUESTS = frozenset(
    [f"{base}/{page}" for base in ("", "/v1") for page in ("health", "ping", "version")]
    + [LIVE_PATH, READY_PATH, SERVER_PATH]
    + ["/livez", "/metrics", "/readyz", ADAPTERS_PATH, LOAD_PATH, PLACE_PATH, STEPS_PATH, USAGE_PATH]
)


class EngineMetrics:
    """The engine's metrics, in a registry of their own."""

    def __init__(
        self, model_name: str, cost_unit: str = "tokens", adapters: Mapping[str, object] | None = None
    ) -> None:
        """cost_unit: the unit of the task's costs, for the help texts. adapters: those served now, by name."""
        self._registry = CollectorRegistry()
        self._label = {"model_name": model_name}
        self._between_tokens = Counts(_BETWEEN_TOKENS_SECONDS)
        self.snapshot = Snapshot(self._label, self._between_tokens)
        self.steps = StepLog()
        self._registry.register(self.snapshot)
        self.adapters = AdapterMetrics(self._label, {} if adapters is None else adapters)
        self._registry.register(self.adapters)
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_SECONDS
        )
        self._per_output_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per token of one answer, without its first token.",
            _BETWEEN_TOKENS_SECONDS,
        )
        self._request = self._histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_SECONDS
        )
        self._queued = self._histogram(
            "vllm:request_queue_time_seconds", "From the engine's queue to the first step.", _REQUEST_SECONDS
        )
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "From the first step to the first token.", _REQUEST_SECONDS
        )
        self._decode = self._histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last.", _REQUEST_SECONDS
        )
        self._inference = self._histogram(
            "vllm:request_inference_time_seconds", "From the first step to the last token.", _REQUEST_SECONDS
        )
        self._preemptions = self._histogram("vllm:request_num_preemptions", "Preemptions of one answer.", _PREEMPTIONS)
        self._prompt_tokens = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of one request.", _POWERS_OF_TWO
        )
        self._output_tokens = self._histogram(
            "vllm:request_generation_tokens", "Generated tokens of one answer.", _POWERS_OF_TWO
        )
        self._max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "max_tokens of the request.", _POWERS_OF_TWO
        )
        self._longest_tokens = self._histogram(
            "vllm:request_max_num_generation_tokens",
            "Generated tokens of the longest of a prompt's answers.",
            _POWERS_OF_TWO,
        )
        self._choices = self._histogram("vllm:request_params_n", "n of the request.", _POWERS_OF_TWO[:8])
        self._step_tokens = self._histogram(
            "vllm:iteration_tokens_total",
            "Tokens of one step: generated tokens, and all tokens of prompts that it completed.",
            _POWERS_OF_TWO,
        )
        self._step_seqs = self._histogram(
            "conveyor_engine_batch_size", "Requests that took part in one step.", _POWERS_OF_TWO[:11]
        )
        self._batch_wait = self._histogram(
            "conveyor_engine_batch_wait_seconds",
            "From the arrival of a batch's first request until the batch closed; includes the window and the wait for "
            "earlier batches.",
            _BATCH_WAIT_SECONDS,
        )
        self._batch_padding = self._histogram(
            "conveyor_engine_batch_padding_ratio", "Share of padding in the cost of a batch, 0 to 1.", _SHARES
        )
        self._batch_cost = self._histogram(
            "conveyor_engine_batch_cost",
            "Cost of a batch when it closed: the sum of its prompts or, if padded, their number times the longest one.",
            _COSTS,
            unit=cost_unit,
        )
        self._success = self._counter("vllm:request_success", "Answers, by the reason of their end.", "finished_reason")
        for reason in set(FinishReason) - {FinishReason.STOP_STRING}:  # reported as STOP
            self._success.labels(finished_reason=reason.value)  # present at 0 from the start
        self._rejections = self._counter("vllm:admission_rejections", "Rejected requests, by reason.", "reason")
        self._ignored_fields = self._counter(
            "conveyor_engine_ignored_fields", "Ignored fields and tools of requests.", "kind"
        )
        self._relaxed_keywords = self._counter(
            "conveyor_engine_relaxed_keywords",
            "Keywords of JSON schemas that answers might not follow, because the engine relaxes them.",
            "keyword",
        )
        self._responses = self._counter(
            "conveyor_engine_http_responses", "HTTP responses by route and status.", "route", "status"
        )
        self._requests = self._counter(
            "http_requests", "HTTP requests without probes, as vLLM counts them.", "handler", "method", "status"
        )

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def observe_step(self, step: StepOutputs) -> None:
        """Update the metrics of steps. Call after each engine step, also after one that only reported aborts."""
        before, now = self.snapshot.stats, step.stats
        self.snapshot.stats = now
        if now.num_steps > before.num_steps:
            generated = now.generation_tokens - before.generation_tokens
            self._step_tokens.observe(now.prompt_tokens - before.prompt_tokens + generated)
            self._step_seqs.observe(now.step_num_seqs)
            self.steps.add(now)
        if now.num_batches > before.num_batches:
            self._batch_cost.observe(now.batch_cost)
            self._batch_padding.observe(now.batch_padding_share)
            self._batch_wait.observe(now.batch_wait_seconds)

    def observe_prompt(self, num_tokens: int, max_tokens: int | None = None) -> None:
        """Observe the size of an admitted request. A request for embeddings has no `max_tokens`."""
        self._prompt_tokens.observe(num_tokens)
        if max_tokens is not None:
            self._max_tokens.observe(max_tokens)

    def observe_first_token(self, seconds: float) -> None:
        """Observe the seconds from a request's arrival to its first token."""
        self._first_token.observe(seconds)

    def observe_next_tokens(self, seconds: float, num_tokens: int) -> None:
        """Observe tokens that arrived together, `seconds` after the tokens before them."""
        self._between_tokens.add(seconds / num_tokens, num_tokens)

    def observe_end(self, reason: str, num_tokens: int, seconds: float, seconds_after_first: float) -> None:
        """Observe an answer that has ended."""
        self._success.labels(finished_reason=reason).inc()
        self._output_tokens.observe(num_tokens)
        self._request.observe(seconds)
        if num_tokens > 1:
            self._per_output_token.observe(seconds_after_first / (num_tokens - 1))

    def observe_stages(self, queued: float, prefill: float, decode: float, num_preemptions: int) -> None:
        """Observe the seconds of each stage of an answer. Call when an answer that had begun has ended."""
        self._queued.observe(queued)
        self._prefill.observe(prefill)
        self._decode.observe(decode)
        self._inference.observe(prefill + decode)
        self._preemptions.observe(num_preemptions)

    def observe_choices(self, number: int, longest_tokens: int) -> None:
        """Observe the answers to one prompt. Call when all of them have ended."""
        self._choices.observe(number)
        self._longest_tokens.observe(longest_tokens)

    def count_rejection(self, reason: str) -> None:
        """Count a request that was rejected before it ran."""
        self._rejections.labels(reason=reason).inc()

    def count_ignored_fields(self, kind: str, number: int) -> None:
        """Count the fields of a request of this kind that no API defines.

        Their names are not a label: clients could send any number of different names.
        """
        self._ignored_fields.labels(kind=kind).inc(number)

    def count_relaxed_keywords(self, keywords: Iterable[str]) -> None:
        """Count the keywords of a request's JSON schemas that its answer might not follow. Their names are fixed."""
        for keyword in keywords:
            self._relaxed_keywords.labels(keyword=keyword).inc()

    def count_response(self, route: str, method: str, status: int) -> None:
        """Count an HTTP answer that has begun. `route` is one of a fixed set."""
        self._responses.labels(route=route, status=str(status)).inc()
        if route in _NOT_REQUESTS:
            return
        method = method if method in _METHODS else "other"
        self._requests.labels(handler=route, method=method, status=f"{status // 100}xx").inc()

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], **more_labels: str) -> Histogram:
        labels = self._label | more_labels
        histogram = Histogram(name, text, list(labels), buckets=buckets, registry=self._registry)
        return histogram.labels(**labels)

    def _counter(self, name: str, text: str, *labels: str) -> "_LabelledCounter":
        return _LabelledCounter(Counter(name, text, [*self._label, *labels], registry=self._registry), self._label)


class _LabelledCounter:
    """A counter whose model name is already filled in."""

    def __init__(self, counter: Counter, label: dict[str, str]) -> None:
        self._counter = counter
        self._label = label

    def labels(self, **labels: str) -> Counter:
        return self._counter.labels(**self._label, **labels)
