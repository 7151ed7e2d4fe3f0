"""InferenceServices for tests: a small good one, changed by what a test is about."""

from typing import Any

from conveyor_api import names

Json = dict[str, Any]


def build_body(name: str = "qwen", /, **spec: Any) -> Json:
    """The smallest good resource with `spec`'s members in place of its own; None removes one."""
    members = {"model": {"uri": "hf://Qwen/Qwen3-0.6B"}, **spec}
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name},
        "spec": {member: value for member, value in members.items() if value is not None},
    }


def build_full_body() -> Json:
    """A resource that uses every field of the spec, except those that exclude one another."""
    return build_body(
        "full",
        model={
            "uri": "hf://Qwen/Qwen3-0.6B@refs/pr/1",
            "name": "Qwen/Qwen3-0.6B",
            "secretRef": {"name": "hub", "key": "token"},
            "cache": {"strategy": "PVC", "size": "20Gi", "storageClassName": "fast", "prewarm": True},
            "quantization": "INT8",
        },
        adapters=[
            {"name": "SQL_v1.2", "uri": "hf://example/sql@v1", "secretRef": {"name": "hub", "key": "token"}},
            {"name": "chat", "uri": "pvc://adapters/chat"},
        ],
        task="Generate",
        listed=True,
        access={"mode": "Required", "serviceAccounts": ["apps/web", "batch/*"], "keyNamespaces": ["team-b"]},
        runtime="Conveyor",
        engine={
            "image": "registry.example:5000/conveyor/engine:1.0@sha256:" + "a" * 64,
            "device": "Auto",
            "dtype": "BFloat16",
            "maxModelLen": 4096,
            "tensorParallelSize": 1,
            "maxQueuedRequests": 64,
            "startupTimeout": "45m",
            "samplingDefaults": "OpenAI",
            "toolParser": "Hermes",
            "reasoningParser": "Think",
            "mediaHosts": ["images.example.com", "cdn.example.com:8443"],
        },
        batching={
            "mode": "Dynamic",
            "maxBatchSize": 16,
            "window": "1s500ms",
            "maxBatchTokens": 2048,
            "lengthGrouping": "Off",
            "eager": True,
            "objectives": {"timeToFirstToken": "500ms", "interTokenLatency": "40ms"},
        },
        kvCache={"blockBudget": 512, "blockSize": 32, "dtype": "FP8"},
        speculation={"method": "NGram", "maxTokens": 4},
        workload={"inputTokens": {"p50": 256, "p95": 1024}, "outputTokens": {"p50": 128, "p95": 512}},
        autoscaling={
            "provider": "Native",
            "minReplicas": 2,
            "maxReplicas": 8,
            "targetUtilizationPercent": 70,
            "queueDepthPerReplica": 3,
            "behavior": {
                "scaleUp": {"selectPolicy": "Max", "tolerance": "0.1"},
                "scaleDown": {
                    "stabilizationWindowSeconds": 30,
                    "policies": [{"type": "Percent", "value": 50, "periodSeconds": 60}],
                },
            },
        },
        queue={
            "maxRequests": 100,
            "timeout": "30s",
            "order": "ShortestFirst",
            "classes": [
                {"name": "chat", "level": 0, "onTimeout": "Reject"},
                {
                    "name": "batch",
                    "level": 100,
                    "maxRequests": 50,
                    "timeout": "20s",
                    "onTimeout": "Delay",
                    "maxShare": 50,
                },
            ],
            "defaultClass": "chat",
            "maxClass": "batch",
        },
        requestTimeout="5m",
        rollout={"maxSurge": "25%", "maxUnavailable": 0},
        drain={"timeout": "1m"},
        resources={
            "requests": {"cpu": 2, "memory": "8Gi", "nvidia.com/gpu": 1},
            "limits": {"memory": "16Gi", "nvidia.com/gpu": "1"},
        },
        metadata={"labels": {"cost-center": "42"}},
        pod={
            "hostUsers": False,
            "dnsConfig": {
                "nameservers": ["10.0.0.10"],
                "searches": ["example.com"],
                "options": [{"name": "ndots", "value": "1"}, {"name": "edns0"}],
            },
            "hostAliases": [{"ip": "10.0.0.7", "hostnames": ["hub.example.com"]}],
            "labels": {"team": "search"},
            "annotations": {"example.com/cost-centre": "7"},
            "serviceAccountName": "models",
            "env": [
                {"name": "HF_ENDPOINT", "value": "http://hub.example"},
                {"name": "CONVEYOR_ENGINE_NUM_THREADS", "value": "4"},
                {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "one", "optional": True}}},
                {"name": "SETTING", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "two"}}},
                {"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            ],
            "nodeSelector": {"nvidia.com/gpu.product": "H200"},
            "tolerations": [{"key": "team", "operator": "Equal", "value": "a", "effect": "NoExecute"}],
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [
                            {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]}
                        ]
                    },
                    "preferredDuringSchedulingIgnoredDuringExecution": [
                        {"weight": 1, "preference": {"matchFields": [{"key": "metadata.name", "operator": "Exists"}]}}
                    ],
                },
                "podAntiAffinity": {
                    "preferredDuringSchedulingIgnoredDuringExecution": [
                        {
                            "weight": 100,
                            "podAffinityTerm": {
                                "topologyKey": "kubernetes.io/hostname",
                                "labelSelector": {"matchLabels": {"app": "other"}},
                                "namespaceSelector": {},
                            },
                        }
                    ]
                },
            },
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
            ],
            "priorityClassName": "high",
            "runtimeClassName": "nvidia",
            "schedulerName": "mine",
            "securityContext": {
                "runAsUser": 1000,
                "runAsGroup": 1001,
                "fsGroup": 1002,
                "fsGroupChangePolicy": "Always",
                "supplementalGroups": [44],
            },
            "imagePullSecrets": [{"name": "registry"}],
            "volumes": [
                {"name": "authorities", "configMap": {"name": "ca", "items": [{"key": "ca", "path": "team.crt"}]}},
                {"name": "key", "secret": {"secretName": "key", "optional": True}},
                {"name": "data", "persistentVolumeClaim": {"claimName": "data", "readOnly": True}},
                {
                    "name": "vault",
                    "csi": {
                        "driver": "secrets-store.csi.k8s.io",
                        "readOnly": True,
                        "volumeAttributes": {"secretProviderClass": "hub"},
                        "nodePublishSecretRef": {"name": "store"},
                    },
                },
                {
                    "name": "big",
                    "ephemeral": {
                        "volumeClaimTemplate": {
                            "spec": {
                                "accessModes": ["ReadWriteOnce"],
                                "storageClassName": "fast",
                                "resources": {"requests": {"storage": "100Gi"}},
                            }
                        }
                    },
                },
                {"name": "cache", "emptyDir": {"sizeLimit": "1Gi", "medium": "Memory"}},
            ],
            "volumeMounts": [
                {
                    "name": "authorities",
                    "mountPath": "/etc/ssl/certs/team.crt",
                    "subPath": "team.crt",
                    "readOnly": True,
                },
                {"name": "cache", "mountPath": "/var/cache/team"},
            ],
            "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "h200"}],
        },
    )
