"""Names that several programs share: API group, children, labels, ports, paths and metrics.

Used by all programs except the engine. Pure: no I/O, and no defaults of the resource, which are in `spec`.
"""

from typing import Final

GROUP: Final = "conveyor.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = "conveyor.dev/v1alpha1"
KIND: Final = "InferenceService"
PLURAL: Final = "inferenceservices"
SINGULAR: Final = "inferenceservice"
SHORT_NAME: Final = "infsvc"
CRD_NAME: Final = f"{PLURAL}.{GROUP}"

# A namespace's claim to a name at the gateway's root.
SERVED_NAME_KIND: Final = "ServedName"
SERVED_NAME_PLURAL: Final = "servednames"
SERVED_NAME_CRD_NAME: Final = f"{SERVED_NAME_PLURAL}.{GROUP}"
MAX_SERVED_NAMES: Final = 100  # limit for one namespace

# A secret key with which clients use services.
API_KEY_KIND: Final = "APIKey"
API_KEY_PLURAL: Final = "apikeys"
API_KEY_CRD_NAME: Final = f"{API_KEY_PLURAL}.{GROUP}"

TOKEN_AUDIENCE: Final = "conveyor"  # of ServiceAccounts' tokens for the gateways

# Field managers of server-side apply. The second one owns only spec.replicas of a Deployment.
FIELD_MANAGER: Final = "conveyor"
REPLICAS_FIELD_MANAGER: Final = "conveyor-replicas"

# Objects that the chart installs.
SYSTEM_NAMESPACE: Final = "conveyor-system"
CLUSTER_DOMAIN: Final = "cluster.local"
GATEWAY_SERVICE: Final = "conveyor-gateway"
GATEWAY_ACCOUNT: Final = "conveyor-gateway"  # ServiceAccount, unless the chart names another
GATEWAY_ADMIN_SERVICE: Final = "conveyor-gateway-admin"
METRICS_SERVICE: Final = "conveyor-metrics"
METRICS_TLS_SECRET: Final = "conveyor-metrics-tls"
USAGE_NAME: Final = "conveyor-usage"  # ConfigMap with what callers have used
OPERATOR_LEASE: Final = "conveyor-operator"  # the operator that holds it reconciles
METRICS_API_ROLE: Final = "conveyor-operator-metrics-api"  # ClusterRole; owns the APIServices

# Ports: of Services if the name contains SERVICE, otherwise of containers.
ENGINE_PORT: Final = 8000
ENGINE_PORT_NAME: Final = "http"
ENGINE_TLS_PORT_NAME: Final = "https"  # of pods that serve TLS; the port of their Service keeps its name
GATEWAY_PORT: Final = 8080
GATEWAY_SERVICE_PORT: Final = 80
GATEWAY_TLS_SERVICE_PORT: Final = 443
GATEWAY_ADMIN_PORT: Final = 8081
METRICS_PORT: Final = 10250  # firewalls of private clusters allow the control plane to reach this port
METRICS_PORT_NAME: Final = "https"
METRICS_SERVICE_PORT: Final = 443
METRICS_ADMIN_PORT: Final = 8081
CONSOLE_PORT: Final = 8080
OPERATOR_ADMIN_PORT: Final = 8081

# HTTP paths. The gateway has /healthz in place of /livez, and serves its two probes on the port for clients too.
LIVENESS_PATH: Final = "/livez"
READINESS_PATH: Final = "/readyz"
GATEWAY_HEALTH_PATH: Final = "/healthz"
PROMETHEUS_PATH: Final = "/metrics"
DEMAND_PATH: Final = "/demand"
ACTIVITY_PATH: Final = "/activity"
START_PATH: Final = "/start"
ADAPTERS_PAGE: Final = "/adapters"
ENGINES_PAGE: Final = "/engines"
STEPS_PAGE: Final = "/steps"
WAITING_PAGE: Final = "/waiting"
RECEIPTS_PAGE: Final = "/receipts"
RECEIPT_PATH: Final = "/receipt"
USAGE_PAGE: Final = "/usage"
KEYS_PAGE: Final = "/keys"

# Labels and annotations.
INFERENCE_SERVICE_LABEL: Final = f"{GROUP}/inference-service"
NAME_LABEL: Final = "app.kubernetes.io/name"
INSTANCE_LABEL: Final = "app.kubernetes.io/instance"
MANAGED_BY_LABEL: Final = "app.kubernetes.io/managed-by"
PART_OF_LABEL: Final = "app.kubernetes.io/part-of"
GATEWAY_POD_LABELS: Final = {NAME_LABEL: "conveyor-gateway"}
UNSERVED_ANNOTATION: Final = f"{GROUP}/unserved"  # of a ServedName whose services were never Ready
TUNE_ANNOTATION: Final = f"{GROUP}/tune"  # the values that `kubectl conveyor tune` restores
TUNE_LABEL: Final = f"{GROUP}/tune-of"  # on a copy: the name of the service that is tuned
CONFIG_HASH_ANNOTATION: Final = f"{GROUP}/config-hash"

# The engine's container: its mount points, and how it reports why it ended.
ENGINE_CONFIG_KEY: Final = "engine.yaml"
ENGINE_CONFIG_PATH: Final = f"/etc/conveyor/{ENGINE_CONFIG_KEY}"
ENGINE_ENV_PREFIX: Final = "CONVEYOR_ENGINE_"
NO_TASK: Final = "none"  # of a fetch for another runtime
MODELS_PATH: Final = "/models"
HUB_MODELS_PATH: Final = f"{MODELS_PATH}/hf"
BUCKET_MODELS_PATH: Final = f"{MODELS_PATH}/s3"
VOLUME_MODELS_PATH: Final = f"{MODELS_PATH}/pvc"
IMAGE_MODELS_PATH: Final = f"{MODELS_PATH}/oci"
FETCHED_ADAPTERS_PATH: Final = f"{MODELS_PATH}/adapters"
ADAPTER_FLAG: Final = "--adapter"  # of a fetch, followed by the adapter's name; the last two arguments
ADAPTERS_PATH: Final = "/adapters"  # adapters in claims and images, and the list of all adapters
ADAPTER_LIST_KEY: Final = "adapters.yaml"
ADAPTER_LIST_PATH: Final = f"{ADAPTERS_PATH}/list/{ADAPTER_LIST_KEY}"
CALLERS_KEY: Final = "callers.json"
CALLERS_PATH: Final = f"/etc/conveyor-callers/{CALLERS_KEY}"  # the accounts that may use the engine
TERMINATION_LOG_ENV: Final = "TERMINATION_LOG"
TERMINATION_LOG_PATH: Final = "/dev/termination-log"
CREDENTIALS_PATH: Final = "/etc/conveyor-credentials"  # of a fetch; a folder for the Secret, with its name
HUB_TOKEN_ENV: Final = "HF_TOKEN"
HUB_TOKEN_KEY: Final = "token"  # key of a Secret, unless secretRef names another
# Keys of a Secret, which are files of the model download: required ones, then optional ones.
BUCKET_KEYS: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
BUCKET_OPTIONAL_KEYS: Final = ("AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL")
CONFIG_VOLUME: Final = "config"
MODEL_VOLUME: Final = "models"
ADAPTERS_VOLUME: Final = "adapters"  # downloaded adapters, if the model's volume cannot contain them
ADAPTER_VOLUME: Final = "adapter"  # followed by a number
ADAPTER_LIST_VOLUME: Final = "adapter-list"
CALLERS_VOLUME: Final = "conveyor-callers"
CREDENTIALS_VOLUME: Final = "conveyor-credentials"  # followed by the name of the fetch container
SHARED_MEMORY_VOLUME: Final = "shared-memory"
SCRATCH_VOLUME: Final = "scratch"
FIXED_VOLUMES: Final = (CONFIG_VOLUME, MODEL_VOLUME)
REPLACEABLE_VOLUMES: Final = (SHARED_MEMORY_VOLUME, SCRATCH_VOLUME)  # a service may set their size and medium
POD_VOLUMES: Final = (*FIXED_VOLUMES, *REPLACEABLE_VOLUMES)

# Devices: GPUs, of which an engine may use several, and MIG slices, of which it may use one.
GPU_VENDOR: Final = "nvidia.com/"
GPU: Final = "nvidia.com/gpu"

# Custom metrics API.
METRICS_GROUP: Final = "custom.metrics.k8s.io"
METRICS_VERSIONS: Final = ("v1beta2", "v1beta1")
IN_FLIGHT_METRIC: Final = "inference_in_flight"
QUEUE_DEPTH_METRIC: Final = "inference_queue_depth"
# The counts behind the two metrics, without regard to starting engines. `kubectl conveyor explain` reads them.
REQUESTS_METRIC: Final = "inference_requests"
WAITING_METRIC: Final = "inference_waiting_requests"
# Metrics of one class of `queue.classes`, which the label names.
CLASS_QUEUED_METRIC: Final = "inference_class_queued"
CLASS_WAIT_METRIC: Final = "inference_class_wait_seconds"
CLASS_LABEL: Final = "request_class"
# Metrics of engines with `batching.objectives`: the number of requests that one engine runs together, and the number of
# engines whose limits have the reason in the label.
RUNNING_LIMIT_METRIC: Final = "inference_running_limit"
LIMITED_ENGINES_METRIC: Final = "inference_limited_engines"
LIMIT_LABEL: Final = "limit_reason"
# KEDA names the metric of its first trigger s0-metric-api-NAME in external.metrics.k8s.io.
KEDA_METRIC_PREFIX: Final = "metric-api-"
READABLE_GATEWAYS: Final = {"gateways": "Readable"}
"""Label for a metric's sum over the gateways that respond. The sum without this label needs all gateways."""

MAX_SERVICE_NAME_LENGTH: Final = 40  # leaves room for "-engine-<hash8>" and the pods' suffixes
ENGINE_SUFFIX: Final = "-engine"
PREWARM_SUFFIX: Final = ".prewarm"
CHECK_SUFFIX: Final = ".check"


def engine_name(service: str) -> str:
    """Return the name of the Deployment and of most other children of `service`, for example the HPA and the PDB."""
    return f"{service}{ENGINE_SUFFIX}"


def public_service_name(service: str) -> str:
    """Return the name of the ExternalName Service that points at the gateway."""
    return service


def config_map_name(service: str, config_hash: str) -> str:
    """Return the name of the immutable ConfigMap with `engine.yaml`. `config_hash` has eight hexadecimal digits."""
    return f"{engine_name(service)}-{config_hash}"


def adapter_list_name(service: str) -> str:
    """Return the name of the ConfigMap with the list of LoRA adapters, which engines follow."""
    return f"{engine_name(service)}-adapters"


def callers_name(service: str) -> str:
    """Return the name of the ConfigMap with the accounts that may use engines of `service`, and the cluster's keys."""
    return f"{engine_name(service)}-callers"


def engine_audience(namespace: str) -> str:
    """Return the audience of tokens for the engines of a namespace, which no other namespace's engines accept."""
    return f"{TOKEN_AUDIENCE}/{namespace}"


def model_claim_name(service: str) -> str:
    """Return the name of the PersistentVolumeClaim that is created for `model.cache.strategy: PVC` without a
    `claimName`."""
    return f"{service}-models"


def prewarm_name(service: str, job_hash: str) -> str:
    """Return the name of the Job that downloads the model of `service`. `job_hash` has eight hexadecimal digits."""
    return f"{service}-prewarm-{job_hash}"


def prewarm_pod_selector(service: str) -> dict[str, str]:
    """Return the label that selects only the prewarm Job's pods: its value has a dot, and names of services do not."""
    return {INFERENCE_SERVICE_LABEL: f"{service}{PREWARM_SUFFIX}"}


def prewarm_labels(service: str) -> dict[str, str]:
    """Return all labels of the prewarm Job's pods."""
    return child_labels(service) | {NAME_LABEL: "conveyor-prewarm"} | prewarm_pod_selector(service)


def check_name(service: str, job_hash: str) -> str:
    """Return the name of the Job that tries the image and configuration of `service`. `job_hash`: as above."""
    return f"{service}-check-{job_hash}"


def check_labels(service: str) -> dict[str, str]:
    """Return all labels of the check Job's pods. No selector for engine pods matches them."""
    label = {INFERENCE_SERVICE_LABEL: f"{service}{CHECK_SUFFIX}"}
    return child_labels(service) | {NAME_LABEL: "conveyor-check"} | label


def child_labels(service: str) -> dict[str, str]:
    """Return the labels of every child and every engine pod of `service`."""
    return {
        NAME_LABEL: "conveyor-engine",
        INSTANCE_LABEL: service,
        MANAGED_BY_LABEL: "conveyor",
        PART_OF_LABEL: "conveyor",
        INFERENCE_SERVICE_LABEL: service,
    }


def pod_selector(service: str) -> dict[str, str]:
    """Return the one label that selects the engine pods of `service`."""
    return {INFERENCE_SERVICE_LABEL: service}


def pod_selector_string(service: str) -> str:
    """Return `pod_selector` in the form of `/scale` and `status.selector`."""
    return f"{INFERENCE_SERVICE_LABEL}={service}"


def gateway_host(system_namespace: str = SYSTEM_NAMESPACE, cluster_domain: str = CLUSTER_DOMAIN) -> str:
    """Return the gateway's name inside the cluster, which is also the target of the public ExternalName Services."""
    return f"{GATEWAY_SERVICE}.{system_namespace}.svc.{cluster_domain}"


def metrics_url(system_namespace: str = SYSTEM_NAMESPACE, cluster_domain: str = CLUSTER_DOMAIN) -> str:
    """Return the URL of the metrics server's plain port inside the cluster, for clients that read pages instead of an
    API."""
    return f"http://{METRICS_SERVICE}.{system_namespace}.svc.{cluster_domain}:{METRICS_ADMIN_PORT}"


def gateway_path(namespace: str, service: str) -> str:
    """Return the path on the gateway below which `service` serves its API, without a trailing slash."""
    return f"/{namespace}/{service}/v1"
