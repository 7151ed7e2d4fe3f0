"""The rows and panels of the chart's Grafana dashboard, as a table. `dashboard.py` draws them.

A panel has a title, a sentence that says what to look for and what to do, a unit, and its queries by legend.
"""

from dataclasses import dataclass

# The labels of a query's series. Engines get `inference_service` from the chart's PodMonitor.
ALL = ""
SERVICE = '{namespace="$namespace", inference_service="$service"}'
PROGRAMS = '{pod=~"conveyor-(gateway|metrics)-.+"}'


@dataclass(frozen=True)
class Panel:
    title: str
    text: str
    unit: str
    queries: dict[str, str]
    width: int = 8
    right: str = ""
    """The legend of the query whose axis is on the right."""


def total(metric: str, *by: str, where: str = SERVICE, how: str = "sum") -> str:
    return f"{how}{_group(by)} ({metric}{where})"


def rate(metric: str, *by: str, where: str = SERVICE) -> str:
    return f"sum{_group(by)} (rate({metric}{where}[$__rate_interval]))"


def quantile(share: float, metric: str, *by: str, where: str = SERVICE, window: str = "$__rate_interval") -> str:
    return f"histogram_quantile({share}, sum{_group(('le', *by))} (rate({metric}_bucket{where}[{window}])))"


def p50_and_p95(metric: str, where: str = SERVICE) -> dict[str, str]:
    return {"P50": quantile(0.5, metric, where=where), "P95": quantile(0.95, metric, where=where)}


def mean(histogram: str, *by: str) -> str:
    return f"{rate(f'{histogram}_sum', *by)} / {rate(f'{histogram}_count', *by)}"


def _group(by: tuple[str, ...]) -> str:
    return f" by ({', '.join(by)})" if by else ""


_EACH = ("namespace", "inference_service")
_NAME = "{{namespace}}/{{inference_service}}"
_OWNED = '{owner!=""}'
_CLIENT = f"{{{{client}}}}: {_NAME}"


def _replicas(of: str, *by: str) -> str:
    return total("conveyor_operator_replicas", *by, where=f'{{of="{of}"}}', how="max")


ROWS: dict[str, list[Panel]] = {
    "All services": [
        Panel(
            "Queued requests",
            "Requests that wait for an engine: for a service that stays above 0, select it and see its row below.",
            "short",
            {_NAME: total("conveyor_gateway_queued_requests", *_EACH, where=ALL)},
        ),
        Panel(
            "Requests in flight",
            "Requests that engines answer now, so you see which services have work.",
            "short",
            {_NAME: total("conveyor_gateway_dispatched_requests", *_EACH, where=ALL)},
        ),
        Panel(
            "Engines",
            "Engines that accept requests: if a service has 0 while its requests wait, read its condition Ready.",
            "short",
            {_NAME: total("conveyor_gateway_engines", *_EACH, where=ALL, how="max")},
        ),
        Panel(
            "Services that are not ready, by reason",
            "1 for each such service: kubectl describe infsvc says what to change, and docs/troubleshooting.md more.",
            "short",
            {
                f"{_NAME}: {{{{reason}}}}": total(
                    "conveyor_operator_condition",
                    *_EACH,
                    "reason",
                    where='{type="Ready", status="False"}',
                    how="max",
                )
            },
            width=12,
        ),
        Panel(
            "Missing replicas",
            "Desired replicas that are not ready: above 0 for longer than a start takes, read the condition Ready.",
            "short",
            {_NAME: f"{_replicas('desired', *_EACH)} - {_replicas('ready', *_EACH)}"},
            width=12,
        ),
        Panel(
            "Requests per second by code",
            "All answers: 499 is a client that left, 429 a full queue, and for 502 to 504 see the next panel.",
            "reqps",
            {"{{code}}": rate("conveyor_gateway_requests_total", "code", where=ALL)},
            width=12,
        ),
        Panel(
            "Requests with 429 or 5xx",
            "Services whose requests fail: select one, and see its answers by code and its dropped requests.",
            "reqps",
            {_NAME: rate("conveyor_gateway_requests_total", *_EACH, where='{code=~"429|5.."}')},
            width=12,
        ),
    ],
    "Use by teams and clients": [
        Panel(
            "Requests at engines",
            "Seconds of engine time that requests use each second, so the average number of requests at engines.",
            "short",
            {_NAME: rate("conveyor_gateway_engine_seconds_total", *_EACH, where=ALL)},
        ),
        Panel(
            "Tokens per second by namespace",
            "Tokens of prompts and of answers of all services of a namespace: which team uses most.",
            "short",
            {
                "{{namespace}}": rate("conveyor_gateway_prompt_tokens_total", "namespace", where=ALL)
                + " + "
                + rate("conveyor_gateway_generation_tokens_total", "namespace", where=ALL)
            },
        ),
        Panel(
            "Refused requests by limit",
            "rate_limit_exceeded: a key, owner or namespace is at its limit (docs/keys.md); else a queue is full.",
            "reqps",
            {
                f"{_NAME}: {{{{reason}}}}": rate(
                    "conveyor_gateway_dropped_requests_total",
                    *_EACH,
                    "reason",
                    where='{reason=~"rate_limit_exceeded|too_many_requests|queue_full"}',
                )
            },
        ),
        Panel(
            "Engines in use by client",
            "Seconds of engines' steps each second, by key or client: what a key costs in whole engines.",
            "short",
            {_CLIENT: rate("conveyor_gateway_client_busy_seconds_total", "client", *_EACH, where=ALL)},
        ),
        Panel(
            "Prompt tokens per second by client",
            "By key, or by name with gateway.clientHeader: who sends most to which service, from any namespace.",
            "short",
            {_CLIENT: rate("conveyor_gateway_client_prompt_tokens_total", "client", *_EACH, where=ALL)},
        ),
        Panel(
            "Generated tokens per second by client",
            "By key, or by name with gateway.clientHeader: for a bill, sum the increase over the month.",
            "short",
            {_CLIENT: rate("conveyor_gateway_client_generation_tokens_total", "client", *_EACH, where=ALL)},
        ),
        Panel(
            "Engines in use by owner",
            "Seconds of engines' steps each second, by the owner that APIKeys name: what a person or team costs.",
            "short",
            {"{{owner}}": rate("conveyor_gateway_client_busy_seconds_total", "owner", where=_OWNED)},
        ),
        Panel(
            "Tokens per second by owner",
            "Tokens of prompts and of answers, by the owner that APIKeys name: who uses most with all keys.",
            "short",
            {
                "{{owner}}": rate("conveyor_gateway_client_prompt_tokens_total", "owner", where=_OWNED)
                + " + "
                + rate("conveyor_gateway_client_generation_tokens_total", "owner", where=_OWNED)
            },
        ),
        Panel(
            "Engine pods held by namespace",
            "Engine pods on nodes, used or not: compare with the engines in use.",
            "short",
            {"{{namespace}}": rate("conveyor_operator_pod_seconds_total", "namespace", where=ALL)},
        ),
    ],
    "Service $namespace/$service": [
        Panel(
            "Conditions that are False, by reason",
            "1 for each condition: ScalingReady explains an autoscaler that does nothing, Progressing a rollout.",
            "short",
            {
                "{{type}}: {{reason}}": total(
                    "conveyor_operator_condition",
                    "type",
                    "reason",
                    where='{namespace="$namespace", inference_service="$service", status="False"}',
                    how="max",
                )
            },
            width=12,
        ),
        Panel(
            "Replicas",
            "Desired at the maximum while requests wait: raise autoscaling.maxReplicas.",
            "short",
            {"{{of}}": total("conveyor_operator_replicas", "of", how="max")},
            width=12,
        ),
        Panel(
            "Requests and engines",
            "Why it scaled: engines (right axis) follow queued + in flight; if not, run kubectl conveyor explain.",
            "short",
            {
                "queued": total("conveyor_gateway_queued_requests"),
                "in flight": total("conveyor_gateway_dispatched_requests"),
                "engines": total("conveyor_gateway_engines", how="max"),
            },
            width=12,
            right="engines",
        ),
        Panel(
            "Queue wait",
            "Time in the gateways' queue of answered requests: if P95 nears queue.timeout, add engines.",
            "s",
            p50_and_p95("conveyor_gateway_queue_wait_seconds"),
            width=12,
        ),
        Panel(
            "Queue wait by class, P95",
            "Only with queue.classes: if an urgent class waits, others hold its places, so lower their maxShare.",
            "s",
            {"{{request_class}}": quantile(0.95, "conveyor_gateway_class_queue_wait_seconds", "request_class")},
        ),
        Panel(
            "Queued requests by class",
            "Only with queue.classes: which classes wait now.",
            "short",
            {"{{request_class}}": total("conveyor_gateway_class_queued_requests", "request_class")},
        ),
        Panel(
            "Time to first byte",
            "From a request's arrival at a gateway: if it grows and the queue wait does not, look at the engines' row.",
            "s",
            p50_and_p95("conveyor_gateway_time_to_first_byte_seconds"),
        ),
        Panel(
            "Answers by code",
            "For each code except 200 and 499, docs/errors.md says what to do.",
            "reqps",
            {"{{code}}": rate("conveyor_gateway_requests_total", "code")},
        ),
        Panel(
            "Dropped requests by reason",
            "Requests without a complete answer: for engine_lost and engine_broke, read status.lastFailure.",
            "reqps",
            {"{{reason}}": rate("conveyor_gateway_dropped_requests_total", "reason")},
        ),
        Panel(
            "Retries by reason",
            "no_place is normal, and behind during a rollout; for lost and refused, look at the engines' logs.",
            "reqps",
            {"{{reason}}": rate("conveyor_gateway_retries_total", "reason")},
        ),
        Panel(
            "Tokens per second",
            "Tokens of prompts and of answers, as the engines report them: the use of the service.",
            "short",
            {
                "prompt": rate("conveyor_gateway_prompt_tokens_total"),
                "generated": rate("conveyor_gateway_generation_tokens_total"),
            },
            width=12,
        ),
        Panel(
            "Cached part of the prompt tokens",
            "Prompt tokens from the prefix cache: near 0 although prompts begin alike, see docs/prefixes.md.",
            "percentunit",
            {
                "cached": f"{rate('conveyor_gateway_cached_prompt_tokens_total')}"
                f" / {rate('conveyor_gateway_prompt_tokens_total')}"
            },
            width=12,
        ),
    ],
    "Engines of $namespace/$service": [
        Panel(
            "Running requests",
            "Requests in the batch: when all engines are at capacity, more requests need more engines.",
            "short",
            {
                "{{pod}}": total("vllm:num_requests_running", "pod"),
                "capacity of one": total("conveyor_engine_capacity", how="max"),
            },
        ),
        Panel(
            "Waiting requests",
            "Requests inside engines without a place in the batch: normally few, because the gateways hold the queue.",
            "short",
            {"{{pod}}": total("vllm:num_requests_waiting", "pod")},
        ),
        Panel(
            "KV cache in use",
            "If it stays at 100 % and preemptions grow, lower maxBatchSize or give the KV cache more memory.",
            "percentunit",
            {"{{pod}}": total("vllm:kv_cache_usage_perc", "pod", how="max")},
        ),
        Panel(
            "Requests in a step, mean",
            "How full batches are: if far below the capacity while requests wait, see the reasons why batches close.",
            "short",
            {"{{pod}}": mean("conveyor_engine_batch_size", "pod")},
        ),
        Panel(
            "Padding of batches, mean",
            "Not in mode Continuous: if the share is high and batching.lengthGrouping is Off, set it to Auto.",
            "percentunit",
            {"{{pod}}": mean("conveyor_engine_batch_padding_ratio", "pod")},
        ),
        Panel(
            "Closed batches by reason",
            "Not in mode Continuous: window is normal under low load, and often kv_blocks means a small KV cache.",
            "ops",
            {"{{reason}}": rate("conveyor_engine_batch_close_total", "reason")},
        ),
        Panel(
            "Time to first token",
            "From a request's arrival at an engine: if it grows, prompts are longer or the batch is full.",
            "s",
            p50_and_p95("vllm:time_to_first_token_seconds"),
        ),
        Panel(
            "Time between tokens",
            "The pace that readers of a stream see: if too slow, lower maxBatchSize or set objectives.",
            "s",
            p50_and_p95("vllm:inter_token_latency_seconds"),
        ),
        Panel(
            "Preemptions per second",
            "Requests that lost their KV blocks and are computed again: above 0 for long, the KV cache is too small.",
            "ops",
            {"{{pod}}": rate("vllm:num_preemptions_total", "pod")},
        ),
        Panel(
            "Requests by adapter",
            "Requests that have ended, by LoRA adapter: an adapter that nobody uses can leave the spec.",
            "reqps",
            {"{{adapter}}": rate("conveyor_engine_adapter_requests_total", "adapter")},
            width=12,
        ),
        Panel(
            "Padding tokens per second",
            "Dummy tokens that batches compute for requests that have ended: for fewer, use another mode than Static.",
            "short",
            {"{{pod}}": rate("conveyor_engine_padding_tokens_total", "pod")},
            width=12,
        ),
    ],
    "Conveyor itself": [
        Panel(
            "CPU",
            "A gateway uses at most one core: if one nears it, add gateway.replicas.",
            "short",
            {"{{pod}}": rate("process_cpu_seconds_total", "pod", where=PROGRAMS)},
        ),
        Panel(
            "Memory",
            "Compare with resources.limits.memory of the program: beyond it, Kubernetes ends the process.",
            "bytes",
            {"{{pod}}": total("process_resident_memory_bytes", "pod", where=PROGRAMS)},
        ),
        Panel(
            "Bodies in gateways",
            "Bytes of request bodies and buffered answers: at --max-held-bytes (128 MiB), a gateway rejects with 503.",
            "bytes",
            {"{{pod}}": total("conveyor_gateway_held_body_bytes", "pod", where=ALL)},
        ),
        Panel(
            "Silence of the API server",
            "Time since a gateway's watches last got data: above 150 s, check whether the API server answers.",
            "s",
            {"{{pod}}": total("conveyor_gateway_watch_silence_seconds", "pod", where=ALL, how="max")},
        ),
        Panel(
            "Leading operator",
            "Exactly one pod is at 1: if none is, edits wait, and services at zero pods do not start.",
            "short",
            {"{{pod}}": total("conveyor_operator_leader", "pod", where=ALL, how="max")},
        ),
        Panel(
            "Reconciles by result",
            "For error, the operator's log has event=reconcile_failed with the InferenceService.",
            "ops",
            {"{{result}}": rate("conveyor_operator_reconciles_total", "result", where=ALL)},
        ),
        Panel(
            "Work of the operator",
            "If services wait for a worker for long, the API server is slow or --workers is too small.",
            "short",
            {
                "waiting for a worker": total("conveyor_operator_queue_depth", where=ALL),
                "busy workers": total("conveyor_operator_busy_workers", where=ALL),
            },
        ),
        Panel(
            "Duration of a reconcile",
            "Above a second for long, compare with the operator's calls to the API server.",
            "s",
            p50_and_p95("conveyor_operator_reconcile_seconds", where=ALL),
        ),
        Panel(
            "Operator's calls to the API server by status",
            "For 403 check the chart's roles; 0 means no answer, and 409 is normal in small numbers.",
            "reqps",
            {"{{status}}": rate("conveyor_operator_api_calls_total", "status", where=ALL)},
        ),
        Panel(
            "Start of engine pods by part, P50 over an hour",
            "Which part of a start takes long: image, model and load grow with their sizes, schedule with full nodes.",
            "s",
            {"{{part}}": quantile(0.5, "conveyor_operator_pod_start_seconds", "part", where=ALL, window="1h")},
        ),
        Panel(
            "Answers of the metrics API by code",
            "The HPAs read here: for 5xx, services keep their replicas, so read the log of conveyor-metrics.",
            "reqps",
            {"{{code}}": rate("conveyor_metrics_requests_total", "code", where=ALL)},
        ),
        Panel(
            "Metrics server's reads of gateways by outcome",
            "While reads are failed, services scale up but not down: the log of conveyor-metrics names the gateway.",
            "reqps",
            {"{{outcome}}": rate("conveyor_metrics_gateway_reads_total", "outcome", where=ALL)},
        ),
        Panel(
            "Unreadable objects and gateways",
            "Always 0: otherwise the log of the program names what it cannot read.",
            "short",
            {
                "gateway: {{resource}}": total("conveyor_gateway_unreadable_objects", "resource", where=ALL, how="max"),
                "metrics server: slices": total("conveyor_metrics_unreadable_slices", where=ALL, how="max"),
                "operator: gateways": total("conveyor_operator_unreadable_gateways", where=ALL, how="max"),
            },
            width=12,
        ),
        Panel(
            "Time until the metrics server's certificate expires",
            "The operator renews it 30 days before: below 14 days, read the operator's log.",
            "s",
            {
                "{{pod}}": total(
                    "conveyor_metrics_serving_certificate_expiry_timestamp_seconds", "pod", where=ALL, how="min"
                )
                + " - time()"
            },
            width=12,
        ),
    ],
}
