"""Builds wrong InferenceServices, each with the words of its refusal. Used by `bad_services`."""

from dataclasses import dataclass
from typing import Any

from tests.api.builders import Json, build_body

HUB = "hf://Qwen/Qwen3-0.6B"
VOLUME = "pvc://models/qwen"
IMAGE = "oci://registry.example.com/models/qwen:1"
ROUNDED = {"uri": HUB, "quantization": "INT8"}
DRAFTS: Json = {"method": "NGram"}
CLAIM = {"strategy": "PVC", "claimName": "a"}
SECRET = {"secretKeyRef": {"name": "a", "key": "b"}}
CHAT, BATCH = {"name": "chat", "level": 1}, {"name": "batch", "level": 100}
LONG: Json = {"p50": 50, "p95": 100}
SQL = {"name": "sql", "uri": "hf://example/sql"}
LATENCY = {"latency": "1s"}
FIELD = {"fieldRef": {"fieldPath": "status.podIP"}}


@dataclass(frozen=True, slots=True)
class Bad:
    """One wrong resource: where it is wrong, and part of the sentence that the API server refuses it with."""

    title: str
    body: Json
    path: str
    sentence: str


def bad(title: str, path: str, sentence: str, /, **spec: Any) -> Bad:
    return Bad(title, build_body("bad", **spec), path, sentence)


def named(title: str, name: str, sentence: str) -> Bad:
    return Bad(title, build_body(name), "metadata.name", sentence)


def model(title: str, path: str, sentence: str, /, **model: Any) -> Bad:
    return bad(title, f"spec.model{path}", sentence, model={"uri": HUB, **model})


def adapters(title: str, path: str, sentence: str, /, *adapters: Json, **spec: Any) -> Bad:
    return bad(title, path, sentence, adapters=list(adapters), **spec)


def adapter(title: str, path: str, sentence: str, /, **adapter: Any) -> Bad:
    return adapters(title, f"spec.adapters[0]{path}", sentence, {**SQL, **adapter})


def drafts(title: str, path: str, sentence: str, /, **speculation: Any) -> Bad:
    return bad(title, f"spec.speculation{path}", sentence, speculation=speculation, engine={"device": "Auto"})


def cache(title: str, path: str, sentence: str, /, **cache: Any) -> Bad:
    return model(title, f".cache{path}", sentence, cache=cache)


def workload(
    title: str, path: str, sentence: str, /, inputs: Json | None, outputs: Json | None = None, **spec: Any
) -> Bad:
    workload = {name: each for name, each in (("inputTokens", inputs), ("outputTokens", outputs)) if each is not None}
    return bad(title, f"spec.workload{path}", sentence, workload=workload, **spec)


def engine(title: str, path: str, sentence: str, /, **engine: Any) -> Bad:
    return bad(title, f"spec.engine{path}", sentence, engine=engine)


def vllm(title: str, path: str, sentence: str, /, batching: Json | None = None, **engine: Any) -> Bad:
    return bad(title, path, sentence, runtime="VLLM", engine={"image": "vllm:1", **engine}, batching=batching)


def pod(title: str, path: str, sentence: str, /, **pod: Any) -> Bad:
    return bad(title, f"spec.pod{path}", sentence, pod=pod)


def queue(title: str, path: str, sentence: str, /, *classes: Json, **queue: Any) -> Bad:
    return bad(title, f"spec.queue{path}", sentence, queue={"classes": list(classes), **queue})


def env(title: str, path: str, sentence: str, /, *variables: Json) -> Bad:
    return pod(title, f".env{path}", sentence, env=list(variables))


def volume(title: str, path: str, sentence: str, /, **volume: Any) -> Bad:
    whole = {"name": "extra", "configMap": {"name": "extra"}, **volume}
    return pod(title, f".volumes[0]{path}", sentence, volumes=[whole])


def mount(title: str, sentence: str, mount_path: str) -> Bad:
    volumes = [{"name": "extra", "configMap": {"name": "extra"}}]
    mounts = [{"name": "extra", "mountPath": mount_path}]
    return pod(title, ".volumeMounts[0].mountPath", sentence, volumes=volumes, volumeMounts=mounts)


def batching(title: str, path: str, sentence: str, /, **batching: Any) -> Bad:
    return bad(title, f"spec.batching{path}", sentence, batching=batching)


def kv_cache(title: str, path: str, sentence: str, /, **kv_cache: Any) -> Bad:
    return bad(title, f"spec.kvCache{path}", sentence, kvCache=kv_cache)


def autoscaling(title: str, path: str, sentence: str, /, **autoscaling: Any) -> Bad:
    return bad(title, f"spec.autoscaling{path}", sentence, autoscaling={"maxReplicas": 4, **autoscaling})


def policy(title: str, path: str, sentence: str, /, **policy: Any) -> Bad:
    whole = {"type": "Pods", "value": 1, "periodSeconds": 60, **policy}
    behavior = {"scaleUp": {"policies": [whole]}}
    return autoscaling(title, f".behavior.scaleUp.policies[0]{path}", sentence, behavior=behavior)


def resources(title: str, path: str, sentence: str, /, **resources: Any) -> Bad:
    return bad(title, f"spec.resources{path}", sentence, resources=resources)


HUB_SHAPE = "must have the form hf://organisation/name[@revision][:file]"
PLACE_SHAPE = "must have the form s3://bucket/prefix or pvc://claim/path"
IMAGE_SHAPE = "must have the form oci://registry/repository[:tag][@sha256:digest][//path]"
DURATION = "must be a duration such as 10ms, 2s or 1m30s"
SURGE = "must be a whole number of pods (0 or more) or a percentage such as 25%"
ACCOUNT = "must be NAMESPACE/NAME or NAMESPACE/*"
AMOUNT = "must be a quantity such as 500m, 2 or 10Gi, and not negative"
DEVICES = "must request GPUs and other devices in whole numbers"
RESERVED = "must not be a variable that Conveyor sets from the spec; of the engine's own variables only"
