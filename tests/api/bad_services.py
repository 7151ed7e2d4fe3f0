"""Every InferenceService that is refused, with the words of the refusal.

Read by two tests: the API server must refuse each with its sentence, and so must the parser, in its own words where
the limit is the schema's rather than a rule's.
"""

from dataclasses import dataclass
from typing import Any

from tests.api.builders import Json, build_body

from conveyor_api import names

HUB = "hf://Qwen/Qwen3-0.6B"
VOLUME = "pvc://models/qwen"
IMAGE = "oci://registry.example.com/models/qwen:1"
CLAIM = {"strategy": "PVC", "claimName": "a"}
SECRET = {"secretKeyRef": {"name": "a", "key": "b"}}
CHAT, BATCH = {"name": "chat", "level": 1}, {"name": "batch", "level": 100}
FIELD = {"fieldRef": {"fieldPath": "status.podIP"}}


@dataclass(frozen=True, slots=True)
class Bad:
    """One wrong resource: where it is wrong, and part of the sentence that the API server refuses it with."""

    title: str
    body: Json
    path: str
    sentence: str


def _bad(title: str, path: str, sentence: str, /, **spec: Any) -> Bad:
    return Bad(title, build_body("bad", **spec), path, sentence)


def _named(title: str, name: str, sentence: str) -> Bad:
    return Bad(title, build_body(name), "metadata.name", sentence)


def _model(title: str, path: str, sentence: str, /, **model: Any) -> Bad:
    return _bad(title, f"spec.model{path}", sentence, model={"uri": HUB, **model})


def _cache(title: str, path: str, sentence: str, /, **cache: Any) -> Bad:
    return _model(title, f".cache{path}", sentence, cache=cache)


def _engine(title: str, path: str, sentence: str, /, **engine: Any) -> Bad:
    return _bad(title, f"spec.engine{path}", sentence, engine=engine)


def _vllm(title: str, path: str, sentence: str, /, batching: Json | None = None, **engine: Any) -> Bad:
    return _bad(title, path, sentence, runtime="VLLM", engine={"image": "vllm:1", **engine}, batching=batching)


def _pod(title: str, path: str, sentence: str, /, **pod: Any) -> Bad:
    return _bad(title, f"spec.pod{path}", sentence, pod=pod)


def _queue(title: str, path: str, sentence: str, /, *classes: Json, **queue: Any) -> Bad:
    return _bad(title, f"spec.queue{path}", sentence, queue={"classes": list(classes), **queue})


def _env(title: str, path: str, sentence: str, /, *variables: Json) -> Bad:
    return _pod(title, f".env{path}", sentence, env=list(variables))


def _volume(title: str, path: str, sentence: str, /, **volume: Any) -> Bad:
    whole = {"name": "extra", "configMap": {"name": "extra"}, **volume}
    return _pod(title, f".volumes[0]{path}", sentence, volumes=[whole])


def _mount(title: str, sentence: str, mount_path: str) -> Bad:
    volumes = [{"name": "extra", "configMap": {"name": "extra"}}]
    mounts = [{"name": "extra", "mountPath": mount_path}]
    return _pod(title, ".volumeMounts[0].mountPath", sentence, volumes=volumes, volumeMounts=mounts)


def _batching(title: str, path: str, sentence: str, /, **batching: Any) -> Bad:
    return _bad(title, f"spec.batching{path}", sentence, batching=batching)


def _kv_cache(title: str, path: str, sentence: str, /, **kv_cache: Any) -> Bad:
    return _bad(title, f"spec.kvCache{path}", sentence, kvCache=kv_cache)


def _autoscaling(title: str, path: str, sentence: str, /, **autoscaling: Any) -> Bad:
    return _bad(title, f"spec.autoscaling{path}", sentence, autoscaling={"maxReplicas": 4, **autoscaling})


def _policy(title: str, path: str, sentence: str, /, **policy: Any) -> Bad:
    whole = {"type": "Pods", "value": 1, "periodSeconds": 60, **policy}
    behavior = {"scaleUp": {"policies": [whole]}}
    return _autoscaling(title, f".behavior.scaleUp.policies[0]{path}", sentence, behavior=behavior)


def _resources(title: str, path: str, sentence: str, /, **resources: Any) -> Bad:
    return _bad(title, f"spec.resources{path}", sentence, resources=resources)


HUB_SHAPE = "must have the shape hf://organisation/name or hf://organisation/name@revision"
BUCKET_SHAPE = "must have the shape s3://bucket/prefix, with the name of a bucket"
VOLUME_SHAPE = "must have the shape pvc://claim/path, with the name of a claim"
IMAGE_SHAPE = "must have the shape oci://registry/repository"
DURATION = "must be a duration such as 10ms, 2s or 1m30s"
SURGE = "must be a whole number of pods (0 or more) or a percentage such as 25%"
AMOUNT = "must be a quantity such as 500m, 2 or 10Gi, and not negative"
DEVICES = "must ask for GPUs and other devices in whole numbers"
RESERVED = "is set by Conveyor from the spec; of the engine's own variables only"

BAD_SERVICES: tuple[Bad, ...] = (
    _named("name of 41 characters", "a" * 41, "metadata.name must have at most 40 characters"),
    _named("name that starts with a digit", "2qwen", "metadata.name must start with a letter"),
    _named("name with a dot", "qwen2.5", "write qwen2-5, not qwen2.5"),
    _named("name that ends in -engine", "qwen-engine", "metadata.name must not end in -engine"),
    Bad("no spec", build_body("bad") | {"spec": {}}, "spec.model", "Required value"),
    _bad("no model", "spec.model", "Required value", model=None),
    _bad("no uri", "spec.model.uri", "Required value", model={"name": "qwen"}),
    _model("empty uri", ".uri", "should be at least 1 chars long", uri=""),
    _model("uri of a web page", ".uri", "must start with hf:// (a repository", uri="https://example.org/m"),
    _model("uri of another store", ".uri", "for example hf://Qwen/Qwen3-0.6B", uri="gs://bucket/model"),
    _model("uri without a scheme", ".uri", "must start with hf://", uri="Qwen/Qwen3-0.6B"),
    _model("uri in capitals", ".uri", "must start with hf://", uri="HF://Qwen/Qwen3-0.6B"),
    _model("uri that is very long", ".uri", "may not be more than 512 bytes", uri="hf://a/" + "b" * 510),
    _model("hub uri without an organisation", ".uri", HUB_SHAPE, uri="hf://gpt2"),
    _model("hub uri with three parts", ".uri", HUB_SHAPE, uri="hf://a/b/c"),
    _model("hub uri with an empty revision", ".uri", HUB_SHAPE, uri="hf://a/b@"),
    _model("hub uri that climbs", ".uri", HUB_SHAPE, uri="hf://a/b@v1/../.."),
    _model("hub uri with a space", ".uri", HUB_SHAPE, uri="hf://a/b c"),
    _model("bucket uri without a prefix", ".uri", BUCKET_SHAPE, uri="s3://models"),
    _model("bucket uri in capitals", ".uri", BUCKET_SHAPE, uri="s3://Models/qwen"),
    _model("bucket uri that climbs", ".uri", BUCKET_SHAPE, uri="s3://models/a/../b"),
    _model("bucket uri with an empty folder", ".uri", BUCKET_SHAPE, uri="s3://models//a"),
    _model("volume uri without a path", ".uri", VOLUME_SHAPE, uri="pvc://models"),
    _model("volume uri with an empty path", ".uri", VOLUME_SHAPE, uri="pvc://models/"),
    _model("volume uri with a claim in capitals", ".uri", VOLUME_SHAPE, uri="pvc://Models/qwen"),
    _model("volume uri that climbs", ".uri", VOLUME_SHAPE, uri="pvc://models/a/../../etc"),
    _model("volume uri with a dot for a path", ".uri", VOLUME_SHAPE, uri="pvc://models/."),
    _model("served name with a space", ".name", "must start and end with a letter or digit", name="my model"),
    _model("secret without a name", ".secretRef.name", "Required value", secretRef={"key": "token"}),
    _model("image without a repository", ".uri", IMAGE_SHAPE, uri="oci://registry"),
    _model("image in capitals", ".uri", IMAGE_SHAPE, uri="oci://registry.example.com/Models/qwen"),
    _model("image with a short digest", ".uri", IMAGE_SHAPE, uri="oci://registry.example.com/qwen@sha256:abc"),
    _model("image that climbs", ".uri", IMAGE_SHAPE, uri="oci://registry.example.com/qwen:1//a/../../etc"),
    _model("image with an empty path", ".uri", IMAGE_SHAPE, uri="oci://registry.example.com/qwen:1//"),
    _model("secret for an image", ".secretRef", "in pod.imagePullSecrets", uri=IMAGE, secretRef={"name": "hub"}),
    _model("cache for an image", ".cache", "each node keeps, and needs no cache", uri=IMAGE, cache=CLAIM),
    _model("secret for a volume", ".secretRef", "is for hf:// and s3:// models", uri=VOLUME, secretRef={"name": "hub"}),
    _model(
        "secret of a bucket with a key",
        ".secretRef",
        "has the keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        uri="s3://models/a",
        secretRef={"name": "bucket", "key": "token"},
    ),
    _model("cache for a volume", ".cache", "is read from its own claim and needs no cache", uri=VOLUME, cache=CLAIM),
    _cache("unknown strategy", ".strategy", 'supported values: "EmptyDir", "PVC"', strategy="HostPath"),
    _cache("PVC with neither claim nor size", "", "exactly one of claimName", strategy="PVC"),
    _cache("PVC with claim and size", "", "exactly one of claimName", strategy="PVC", claimName="a", size="1Gi"),
    _cache("claim without PVC", ".claimName", "claimName is only for strategy PVC", claimName="models"),
    _cache("prewarm without PVC", ".prewarm", "prewarm is only for strategy PVC", prewarm=True),
    _cache("storage class without PVC", ".storageClassName", "only for strategy PVC with a size", storageClassName="a"),
    _cache(
        "storage class with an existing claim",
        ".storageClassName",
        "only for strategy PVC with a size",
        strategy="PVC",
        claimName="models",
        storageClassName="fast",
    ),
    _cache("size that is no quantity", ".size", "must be a quantity such as", strategy="PVC", size="20 GB"),
    _cache("size of nothing", ".size", "size must be more than 0", size="0"),
    _engine("image with a space", ".image", "must be an image reference such as", image="conveyor engine"),
    _engine("unknown device", ".device", 'supported values: "CUDA", "Auto"', device="cuda"),
    _engine("unknown dtype", ".dtype", "supported values:", dtype="fp16"),
    _engine("one token", ".maxModelLen", "should be greater than or equal to 2", maxModelLen=1),
    _engine("queue of none", ".maxQueuedRequests", "should be greater than or equal to 1", maxQueuedRequests=0),
    _bad("unknown runtime", "spec.runtime", 'supported values: "Conveyor", "VLLM"', runtime="SGLang"),
    _bad("unknown task", "spec.task", 'supported values: "Generate", "Embed", "Rerank", "Classify"', task="Translate"),
    _bad(
        "a task for vLLM",
        "spec.task",
        "vLLM finds out by itself what a model does",
        runtime="VLLM",
        engine={"image": "vllm:1"},
        task="Rerank",
    ),
    _bad("vLLM without its image", "spec.engine", "runtime VLLM needs engine.image", runtime="VLLM"),
    _vllm("vLLM with batches", "spec.batching", "vLLM batches in mode Continuous alone", batching={"mode": "Static"}),
    _vllm("vLLM with a queue", "spec.engine", "vLLM has no limit for the requests", maxQueuedRequests=3),
    _vllm("argument of a field", "spec.engine.args", "these come from other fields", args=["--max_num_seqs=4"]),
    _vllm("argument that is a port", "spec.engine.args", "these come from other fields", args=["--port", "1"]),
    _vllm("empty argument", "spec.engine.args[0]", "should be at least 1 chars long", args=[""]),
    _engine("arguments without vLLM", "", "engine.args are arguments of vLLM", args=["--enable-lora"]),
    _engine("tokens as text", ".maxModelLen", "must be of type integer", maxModelLen="4096"),
    _env(
        "variable that starts with a digit", "[0].name", "must be the name of an environment variable", {"name": "1A"}
    ),
    _env("variable with a dash", "[0].name", "must be the name of an environment", {"name": "A-B", "value": "1"}),
    _env("variable without a value", "[0]", "exactly one of value and valueFrom", {"name": "A"}),
    _env(
        "variable with two values",
        "[0]",
        "exactly one of value and valueFrom",
        {"name": "A", "value": "1", "valueFrom": FIELD},
    ),
    _env("variable from nowhere", "[0].valueFrom", "valueFrom needs exactly one of", {"name": "A", "valueFrom": {}}),
    _env(
        "variable from two places",
        "[0].valueFrom",
        "valueFrom needs exactly one of",
        {"name": "A", "valueFrom": SECRET | FIELD},
    ),
    _env("variable twice", "", "Duplicate value", {"name": "A", "value": "1"}, {"name": "A", "value": "2"}),
    _env("variable of the spec", "[0].name", RESERVED, {"name": "CONVEYOR_ENGINE_MAX_NUM_SEQS", "value": "1"}),
    _env("variable of the pod", "[0].name", RESERVED, {"name": "TERMINATION_LOG", "value": "/tmp/log"}),
    _bad(
        "token from two places",
        "spec.pod",
        "credentials come from model.secretRef",
        model={"uri": HUB, "secretRef": {"name": "hub"}},
        pod={"env": [{"name": "HF_TOKEN", "value": "x"}]},
    ),
    _batching("unknown mode", ".mode", 'supported values: "None", "Static", "Dynamic", "Continuous"', mode="Continuos"),
    _batching("mode in small letters", ".mode", "Unsupported value", mode="continuous"),
    _batching("batch of none", ".maxBatchSize", "should be greater than or equal to 1", maxBatchSize=0),
    _batching("batch of 1025", ".maxBatchSize", "should be less than or equal to 1024", maxBatchSize=1025),
    _batching("window on Continuous", ".window", "window is only for modes Static and Dynamic", window="10ms"),
    _batching("window on None", ".window", "window is only for modes Static and Dynamic", mode="None", window="10ms"),
    _batching("window without a unit", ".window", DURATION, mode="Dynamic", window="10"),
    _batching("window with a fraction", ".window", DURATION, mode="Dynamic", window="1.5s"),
    _batching("window as ISO 8601", ".window", DURATION, mode="Static", window="PT5S"),
    _batching("window of nothing", ".window", "must be between 1ms and 1h", mode="Dynamic", window="0s"),
    _batching("window of two hours", ".window", "must be between 1ms and 1h", mode="Static", window="2h"),
    _batching("window as a number", ".window", "must be of type string", mode="Dynamic", window=10),
    _batching(
        "fewer tokens than requests",
        ".maxBatchTokens",
        "must be at least maxBatchSize",
        maxBatchTokens=8,
        maxBatchSize=9,
    ),
    _kv_cache("both budgets", ".memoryPercent", "not both", blockBudget=100, memoryPercent=50),
    _kv_cache("all of the memory", ".memoryPercent", "should be less than or equal to 99", memoryPercent=100),
    _kv_cache("none of the memory", ".memoryPercent", "should be greater than or equal to 1", memoryPercent=0),
    _kv_cache("per cent as text", ".memoryPercent", "must be of type integer", memoryPercent="85%"),
    _kv_cache("per cent as a fraction", ".memoryPercent", "must be of type integer", memoryPercent=0.85),
    _kv_cache("block of 17 tokens", ".blockSize", "blockSize must be 8, 16, 32, 64 or 128 tokens", blockSize=17),
    _kv_cache("budget of nothing", ".blockBudget", "should be greater than or equal to 1", blockBudget=0),
    _bad(
        "budget below the longest request",
        "spec.kvCache",
        "kvCache.blockBudget x kvCache.blockSize must be at least engine.maxModelLen",
        engine={"maxModelLen": 4097},
        kvCache={"blockBudget": 256},
    ),
    _bad("replicas below nothing", "spec.replicas", "should be greater than or equal to 0", replicas=-1),
    _bad("replicas without end", "spec.replicas", "should be less than or equal to 1000", replicas=1001),
    _bad("no maximum", "spec.autoscaling.maxReplicas", "Required value", autoscaling={"minReplicas": 1}),
    _autoscaling(
        "minimum above maximum", ".minReplicas", "minReplicas must not be more than maxReplicas", minReplicas=5
    ),
    _autoscaling("minimum below nothing", ".minReplicas", "should be greater than or equal to 0", minReplicas=-1),
    _autoscaling("maximum of nothing", ".maxReplicas", "greater than or equal to 1", minReplicas=0, maxReplicas=0),
    _autoscaling("idle time where an engine always runs", ".idleTimeout", "set minReplicas: 0", idleTimeout="5m"),
    _autoscaling("idle time of a second", ".idleTimeout", "between 5s and 168h", minReplicas=0, idleTimeout="1s"),
    _autoscaling("idle time as a number", ".idleTimeout", "must be of type string", minReplicas=0, idleTimeout=300),
    _autoscaling(
        "utilization of 101", ".targetUtilizationPercent", "less than or equal to 100", targetUtilizationPercent=101
    ),
    _autoscaling(
        "provider that is unknown", ".provider", 'supported values: "Native", "KEDA", "External"', provider="Keda"
    ),
    _autoscaling("behavior of another's autoscaler", ".provider", "are not for", provider="External", behavior={}),
    _autoscaling("depth target of another", ".provider", "are not for", provider="External", queueDepthPerReplica=1),
    _autoscaling("zero by another", ".provider", "is for Conveyor's own", provider="External", minReplicas=0),
    _autoscaling("zero by KEDA", ".provider", "is for Conveyor's own", provider="KEDA", minReplicas=0),
    _autoscaling("queue of nothing", ".queueDepthPerReplica", "greater than or equal to 1", queueDepthPerReplica=0),
    _bad(
        "replicas that two things set",
        "spec.replicas",
        "with autoscaling the HorizontalPodAutoscaler sets the replicas",
        replicas=1,
        autoscaling={"maxReplicas": 4},
    ),
    _policy("change of nothing", ".value", "should be greater than or equal to 1", value=0),
    _policy("period above half an hour", ".periodSeconds", "less than or equal to 1800", periodSeconds=1801),
    _policy("change of unknown kind", ".type", 'supported values: "Pods", "Percent"', type="Nodes"),
    _autoscaling(
        "window above an hour",
        ".behavior.scaleDown.stabilizationWindowSeconds",
        "less than or equal to 3600",
        behavior={"scaleDown": {"stabilizationWindowSeconds": 3601}},
    ),
    _bad("queue without a place", "spec.queue.maxRequests", "greater than or equal to 1", queue={"maxRequests": 0}),
    _bad("wait of nothing", "spec.queue.timeout", "must be between 1s and 1h", queue={"timeout": "999ms"}),
    _bad("wait as a number", "spec.queue.timeout", "must be of type string", queue={"timeout": 60}),
    _queue("two classes of one name", ".classes", "Duplicate value", CHAT, CHAT | {"level": 2}),
    _queue("two classes of one level", ".classes", "needs a level of its own", CHAT, BATCH | {"level": 1}),
    _queue(
        "class of a worse level than any", ".classes[0].level", "less than or equal to 1000", CHAT | {"level": 1001}
    ),
    _queue("class in capitals", ".classes[0].name", "must be a name of lower-case", CHAT | {"name": "Chat"}),
    _queue("delay without an end", ".classes", "needs a timeout below", BATCH | {"onTimeout": "Delay"}),
    _queue("delay after the end", ".classes", "below queue.timeout", BATCH | {"onTimeout": "Delay", "timeout": "60s"}),
    _queue("share of nothing", ".classes[0].maxShare", "greater than or equal to 1", CHAT | {"maxShare": 0}),
    _queue("default class of another", ".defaultClass", "must be the name of one", CHAT, defaultClass="batch"),
    _queue("default class without classes", ".defaultClass", "must be the name of one", defaultClass="batch"),
    _queue("best class of another", ".maxClass", "maxClass must be the name of one", CHAT, maxClass="batch"),
    _queue("order of none", ".order", 'supported values: "FIFO", "ShortestFirst"', order="LIFO"),
    _queue(
        "more classes than there may be",
        ".classes",
        "must have at most 16 items",
        *({"name": f"c{level}", "level": level} for level in range(17)),
    ),
    _bad("timeout without a unit", "spec.requestTimeout", DURATION, requestTimeout="600"),
    _bad("timeout above a day", "spec.requestTimeout", "must be between 1s and 24h", requestTimeout="24h1s"),
    _bad("rollout that cannot move", "spec.rollout", "must not both be 0", rollout={"maxUnavailable": 0}),
    _bad(
        "rollout of no per cent",
        "spec.rollout",
        "must not both be 0",
        rollout={"maxSurge": "0%", "maxUnavailable": "0%"},
    ),
    _bad("surge below nothing", "spec.rollout.maxSurge", SURGE, rollout={"maxSurge": -1}),
    _bad("surge as text", "spec.rollout.maxSurge", SURGE, rollout={"maxSurge": "1"}),
    _bad("unavailable without a number", "spec.rollout.maxUnavailable", SURGE, rollout={"maxUnavailable": "%"}),
    _bad("drain of two hours", "spec.drain.timeout", "must be between 0s and 1h", drain={"timeout": "2h"}),
    _resources("amount that is none", ".limits[memory]", AMOUNT, limits={"memory": "8 GB"}),
    _resources("amount below nothing", ".limits[cpu]", AMOUNT, limits={"cpu": "-1"}),
    _resources("half a GPU", ".limits", DEVICES, limits={"nvidia.com/gpu": "500m"}),
    _resources("resource with a space", ".limits", "must name resources as Kubernetes does", limits={"my gpu": 1}),
    _resources(
        "requests above limits",
        ".requests",
        "requests must not be more than limits",
        requests={"cpu": 2},
        limits={"cpu": "500m"},
    ),
    _resources(
        "GPU in requests only", ".requests", "GPUs and other devices go into limits", requests={"nvidia.com/gpu": 1}
    ),
    _resources("seven resources", ".limits", "must have at most 6 items", limits={f"r{n}": 1 for n in range(7)}),
    _bad(
        "toleration of unknown effect",
        "spec.pod.tolerations[0].effect",
        "supported values:",
        pod={"tolerations": [{"effect": "NoRun"}]},
    ),
    _bad(
        "affinity that Kubernetes does not know",
        "spec.pod.affinity.anything",
        "unknown field",
        pod={"affinity": {"anything": {}}},
    ),
    _bad(
        "affinity with an unknown operator",
        "spec.pod.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0]"
        ".labelSelector.matchExpressions[0].operator",
        "supported values:",
        pod={
            "affinity": {
                "podAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": [
                        {
                            "topologyKey": "zone",
                            "labelSelector": {"matchExpressions": [{"key": "app", "operator": "Gt"}]},
                        }
                    ]
                }
            }
        },
    ),
    _bad(
        "spread that is not told what to do",
        "spec.pod.topologySpreadConstraints[0].whenUnsatisfiable",
        "Required value",
        pod={"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone"}]},
    ),
    _bad(
        "spread with groups that nothing enforces",
        "spec.pod.topologySpreadConstraints[0]",
        "minDomains needs whenUnsatisfiable: DoNotSchedule",
        pod={
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "minDomains": 2}
            ]
        },
    ),
    _pod("pull secret twice", ".imagePullSecrets", "Duplicate value", imagePullSecrets=[{"name": "a"}, {"name": "a"}]),
    _pod("label of ours", ".labels", "must leave out labels of Conveyor's own", labels={names.NAME_LABEL: "x"}),
    _pod("label of our group", ".labels", "and those of conveyor.dev/", labels={names.INFERENCE_SERVICE_LABEL: "x"}),
    _pod(
        "annotation of ours",
        ".annotations",
        "must leave out annotations of Conveyor's own",
        annotations={names.CONFIG_HASH_ANNOTATION: "x"},
    ),
    _pod("root", ".securityContext.runAsUser", "greater than or equal to 1", securityContext={"runAsUser": 0}),
    _pod("privileges", ".securityContext.privileged", "unknown field", securityContext={"privileged": True}),
    _pod("the node's network", ".hostNetwork", "unknown field", hostNetwork=True),
    _volume("folder of the node", ".hostPath", "unknown field", hostPath={"path": "/"}),
    _volume("volume of two kinds", "", "exactly one of configMap, secret", secret={"secretName": "a"}),
    _volume("volume of no kind", "", "exactly one of configMap, secret", configMap=None),
    _volume("volume of ours", ".name", "is a volume of Conveyor's own", name="models"),
    _volume("volume in capitals", ".name", "must be the name of a volume", name="Extra"),
    _volume("folder without a limit", ".emptyDir.sizeLimit", "Required value", configMap=None, emptyDir={}),
    _volume(
        "folder of nothing", ".emptyDir.sizeLimit", "must be more than 0", configMap=None, emptyDir={"sizeLimit": "0"}
    ),
    _mount("mount over the models", "belong to the system and to Conveyor", "/models/other"),
    _mount("mount over the configuration", "belong to the system and to Conveyor", "/etc/conveyor"),
    _mount("mount over the system's files", "belong to the system and to Conveyor", "/etc"),
    _mount("mount without a root", "must be an absolute path", "certs"),
    _mount("mount that climbs", "must be an absolute path", "/certs/../models"),
    _mount("mount over everything", "must be an absolute path", "/"),
    _pod(
        "mount of nothing",
        ".volumeMounts",
        "volumeMounts must name volumes of pod.volumes",
        volumeMounts=[{"name": "extra", "mountPath": "/extra"}],
    ),
    _pod("device from nowhere", ".resourceClaims[0]", "needs exactly one of", resourceClaims=[{"name": "gpu"}]),
    _bad("unknown field of the spec", "spec.modelUri", "unknown field", modelUri="x"),
    _bad("field in snake case", "spec.max_queued_requests", "unknown field", max_queued_requests=1),
    _batching("unknown field deep down", ".maxBatchsize", "unknown field", maxBatchsize=8),
)
