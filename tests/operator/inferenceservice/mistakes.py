"""25 mistakes of users, and Conveyor's messages for them. A page and its tests are made from this data.

`docs/troubleshooting.md` has `build_table()`; `test_mistakes.py` compares the two, and makes each mistake on a real API
server, where `kubelet.py` gives the pods the states that real ones have then. `e2e/test_mistakes.py` makes them on a
whole cluster, and prints after how many seconds they are told.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tests.operator import kubelet
from tests.operator.kubelet import Decide, Json
from tests.operator.stage import Space, make_service

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ConfigError
from conveyor_engine.execution.kv_budget import plan_num_blocks
from e2e.cluster.gpus import COUNT

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Refused:
    """A mistake that the API server refuses immediately."""

    done: str
    sentence: str
    do: Callable[[Space], object]


@dataclass(frozen=True, slots=True)
class Reported:
    """A mistake that the status reports: READY and REASON in `kubectl get`, and a sentence in `kubectl describe`.

    `after` is the time from `kubectl apply` on, as `e2e/test_mistakes.py` saw it once on the local cluster.
    """

    done: str
    after: str
    reason: str
    sentence: str
    play: Decide = lambda pod: None
    spec: Json = field(default_factory=dict)
    ready: str = "False"
    quota: Json = field(default_factory=dict)
    on_cluster: Json = field(default_factory=dict)  # these parts of the quickstart's spec make it on a real cluster ...
    seen: str = ""  # ... which has this part of the sentence; empty: all of it


def make(space: Space, **spec: object) -> Json:
    return space.make_service("refused", **spec)


def make_unknown(space: Space) -> Json:
    path = space.path("InferenceService") + "?fieldValidation=Strict"  # as kubectl asks for it
    return space.api.create(path, make_service("refused", batchng={"mode": "Static"}))


def scale(space: Space) -> Json:
    space.make_service("scaled", autoscaling={"maxReplicas": 4})
    return space.patch("InferenceService", "scaled", {"spec": {"replicas": 2}}, "scale")


def request_too_much(space: Space) -> Json:
    uri = space.make_service("edited")["spec"]["model"]["uri"]
    space.patch("InferenceService", "edited", {"status": {"model": {"uri": uri, "contextLength": 1024}}}, "status")
    return space.edit("edited", engine={"maxModelLen": 4096})


def budget_error(num_kv_blocks: int, max_model_len: int) -> tuple[str, str]:
    """Return (reason, message) as the engine reports them."""
    try:
        plan_num_blocks(
            EngineConfig(model="/m", num_kv_blocks=num_kv_blocks),
            max_num_seqs=4, max_model_len=max_model_len, block_bytes=MIB, free_bytes=4096 * MIB, is_cpu=False,
        )  # fmt: skip
    except ConfigError as error:
        return error.reason, str(error)
    raise AssertionError("the engine takes it")


def engine_failed(reason: str, message: str) -> Decide:
    return partial(kubelet.engine_failed, reason=reason, message=message)


def fetch_failed(reason: str, message: str) -> Decide:
    return partial(kubelet.fetch_failed, reason=reason, message=message)


def first_ready(message: str) -> Decide:
    """Return a function that lets the first pod find a node, and no other pod."""
    placed: list[str] = []

    def play(pod: Json) -> Json:
        name = pod["metadata"]["name"]
        if not placed:
            placed.append(name)
        return kubelet.ready(pod) if name in placed else kubelet.unschedulable(pod, message)

    return play


NO_GPU = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
HUB = {"uri": "hf://example/model"}
NO_SECRET = "Secret hub does not exist in this namespace, or lacks the key of secretRef.key (token by default)"
CUDA_SAYS = (
    "`device: cuda` is set, but no CUDA device is visible here; ask for a GPU (resources.limits: nvidia.com/gpu: 1), "
    "or set `device: auto` to run on the CPU"
)

REFUSED = (
    Refused("`batching.mode: Continuos`", 'supported values: "None", "Static", "Dynamic", "Continuous"',
            partial(make, batching={"mode": "Continuos"})),
    Refused("`batchng:`, a field that is not there", 'unknown field "spec.batchng"', make_unknown),
    Refused("`model.uri: https://huggingface.co/...`",
            "must start with hf:// (Hugging Face hub), s3:// (bucket), pvc://",
            partial(make, model={"uri": "https://huggingface.co/Qwen/Qwen3-0.6B"})),
    Refused("`batching.window` with `mode: Continuous`", "window is only for modes Static and Dynamic",
            partial(make, batching={"mode": "Continuous", "window": "10ms"})),
    Refused("`kvCache.blockBudget: 4`, `engine.maxModelLen: 512`",
            "kvCache.blockBudget x kvCache.blockSize must be at least engine.maxModelLen",
            partial(make, kvCache={"blockBudget": 4})),
    Refused("`kubectl scale` with `autoscaling` set", "with autoscaling the HorizontalPodAutoscaler sets the replicas",
            scale),
    Refused("`engine.maxModelLen` of a live service edited to more than its model has",
            "spec.engine.maxModelLen exceeds the context length of the model, status.model.contextLength",
            request_too_much),
)  # fmt: skip

REPORTED = (
    Reported("`pvc://models/demo`, and no such claim in the namespace", "1 s", "ClaimNotFound",
         "has no PersistentVolumeClaim models; create it, or correct model.uri or model.cache.claimName",
         partial(kubelet.unschedulable,
                 message='0/1 nodes are available: persistentvolumeclaim "models" not found. not found'),
         on_cluster={"model": {"uri": "pvc://others/demo"}}, seen="has no PersistentVolumeClaim others; create it"),
    Reported("`pvc://models/nowhere`, a folder that is not in the volume", "3 s", "ModelNotFound",
         "pvc://models/nowhere: there is no directory /models/pvc/nowhere",
         fetch_failed("ModelNotFound", "pvc://models/nowhere: there is no directory /models/pvc/nowhere"),
         on_cluster={"model": {"uri": "pvc://models/nowhere"}}),
    Reported("a hub that the nodes do not reach", "3 s", "ModelDownloadFailed",
         "example/model at https://huggingface.co cannot be fetched",
         fetch_failed("ModelDownloadFailed",
                    "example/model at https://huggingface.co cannot be fetched: ConnectError: [Errno -2] Name or "
                    "service not known"), {"model": HUB},
         on_cluster={"model": HUB}),
    Reported("`model.secretRef` names a Secret that is not there", "6 s", "SecretNotFound",
         NO_SECRET, fetch_failed("SecretNotFound", NO_SECRET), {"model": HUB},
         on_cluster={"model": HUB | {"secretRef": {"name": "hub"}}}),
    Reported("an encoder-decoder", "10 s", "UnsupportedModel",
         "t5 is an encoder-decoder; this engine runs decoder-only language models",
         engine_failed("UnsupportedModel", "t5 is an encoder-decoder; this engine runs decoder-only language models"),
         on_cluster={"model": {"uri": "pvc://models/t5"}}),
    Reported("`engine.image` with a typing error", "3 s", "ImagePullFailed", "image example/engine:1 cannot be pulled",
         kubelet.image_pull_failed,
         on_cluster={"engine": {"device": "Auto", "image": "example/engine:1"}}),
    Reported("`pod.env` from a ConfigMap that is not there", "3 s", "ContainerConfigInvalid",
         'container fetch cannot start: configmap "proxy" not found in namespace',
         partial(kubelet.cannot_start, container="fetch", message='configmap "proxy" not found'),
         on_cluster={"pod": {"env": [
             {"name": "HTTPS_PROXY", "valueFrom": {"configMapKeyRef": {"name": "proxy", "key": "url"}}}]}}),
    Reported("no GPU in `resources.limits`, with `engine.device: CUDA`", "11 s", "NoDevice",
         "engine.device: CUDA is set, but no CUDA device is visible here; ask for a GPU "
         "(resources.limits: nvidia.com/gpu: 1), or set engine.device: Auto to run on the CPU",
         engine_failed("NoDevice", CUDA_SAYS),
         on_cluster={"engine": {"device": "CUDA"}, "resources": {"limits": {"cpu": 1}}}),
    Reported("more GPUs than any node has free", "1 s", "InsufficientGPU", NO_GPU,
         partial(kubelet.unschedulable, message=NO_GPU),
         on_cluster={"resources": {"limits": {"nvidia.com/gpu": 100}}}, seen="Insufficient nvidia.com/gpu"),
    Reported("the same for three of four replicas", "17 s, when the first is ready", "InsufficientGPU",
         f"1 of 4 engines are ready; {NO_GPU}",
         first_ready(NO_GPU), {"replicas": 4}, ready="True",
         on_cluster={"replicas": 4, "engine": {"device": "Auto", "tensorParallelSize": 1},
                     "resources": {"limits": {"nvidia.com/gpu": COUNT // 2 + 1, "cpu": 1}}},
         seen="1 of 4 engines are ready; "),
    Reported("`pod.nodeSelector` that no node has", "1 s", "Unschedulable",
         "3 node(s) didn't match Pod's node affinity/selector",
         partial(kubelet.unschedulable,
                 message="0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector."),
         on_cluster={"pod": {"nodeSelector": {"disk": "none"}}},
         seen="didn't match Pod's node affinity/selector"),
    Reported("`limits: {nvidia.com/gpu: 4}` with `task: Embed`", "13 s, when it is ready", "GPUsUnused",
         "1 of 1 engines are ready; each engine requests 4 GPUs and uses one; request one GPU in resources.limits",
         kubelet.ready,
         {"task": "Embed", "resources": {"limits": {"nvidia.com/gpu": 4}}}, ready="True",
         on_cluster={"model": {"uri": "pvc://models/demo-embed"}, "task": "Embed", "kvCache": {},
                     "resources": {"limits": {"nvidia.com/gpu": 4, "cpu": 1}}}),
    Reported("`limits: {memory: 100Mi}`", "6 s", "OOMKilled",
         "container engine used more than its memory limit and was killed; raise resources.limits.memory",
         partial(kubelet.oom_killed, message='{"reason": "EngineError", "message": "the engine was ended by SIGKILL"}'),
         {"resources": {"limits": {"memory": "100Mi"}}},
         on_cluster={"resources": {"limits": {"nvidia.com/gpu": 1, "memory": "100Mi"}}}),
    Reported("a new service with `engine.maxModelLen: 4096`, whose model has 1,024", "12 s", "InvalidConfig",
         "engine.maxModelLen is 4096, but the model was made for at most 1024 tokens; lower it",
         engine_failed("InvalidConfig",
                     "`max_model_len` is 4096, but the model was made for at most 1024 tokens; lower it"),
         on_cluster={"engine": {"device": "Auto", "maxModelLen": 4096}}, seen="; lower it"),
    Reported("`kvCache.blockBudget: 8`, less than one request of the model's 1,024 tokens", "11 s",
         "KVBudgetTooSmall",
         "kvCache.blockBudget gives 8 KV blocks of 16 tokens, but one request of 1024 tokens needs 64 (64 MiB); "
         "set engine.maxModelLen to 128 or less, or give the KV cache more room",
         engine_failed(*budget_error(8, 1024)), {"engine": {"device": "Auto"}},
         on_cluster={"kvCache": {"blockBudget": 8}}, seen="kvCache.blockBudget gives 8 KV blocks of 16 tokens"),
    Reported("`kvCache.blockBudget: 9999`, more than fits", "14 s", "KVBudgetTooLarge",
         "lower kvCache.blockBudget to 3891 or less",
         engine_failed(*budget_error(9999, 1024)), {"engine": {"device": "Auto"}},
         on_cluster={"kvCache": {"blockBudget": 9_000_000}}, seen="lower kvCache.blockBudget to "),
    Reported("a ResourceQuota without room", "1 s", "PodsRefused", "exceeded quota: none", quota={"pods": "0"}),
    Reported("`pod.nodeSelector: {not a label: x}`", "1 s", "ChildRefused", "Deployment refused-child-engine:",
         spec={"pod": {"nodeSelector": {"not a label": "x"}}},
         on_cluster={"pod": {"nodeSelector": {"not a label": "x"}}}, seen="not a label"),
)  # fmt: skip


def build_table() -> str:
    """Return the table in Markdown."""
    rows = ["| mistake | shown after | `kubectl get infsvc` | `kubectl describe infsvc` |", "| --- | --- | --- | --- |"]
    rows += [f"| {m.done} | at once | refused | {_cell(m.sentence)} |" for m in REFUSED]
    rows += [f"| {m.done} | {m.after} | `{m.ready}`, `{m.reason}` | {_cell(m.sentence)} |" for m in REPORTED]
    return "\n".join(rows)


def _cell(message: str) -> str:
    return f"... {message} ...".replace("|", "\\|")
