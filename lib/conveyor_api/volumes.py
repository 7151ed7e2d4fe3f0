"""`spec.pod.volumes` and `spec.pod.volumeMounts`: files in addition to the model.

The kinds of volume are those that the Pod Security Standard "restricted" allows, without `projected` (docs/scope.md).
So folders of the node are not allowed. An emptyDir must have a limit, so that no pod fills its node.
"""

import re
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field
from pydantic.alias_generators import to_snake

from conveyor_api import names
from conveyor_api.base import ApiModel, KeyedBy, Rule
from conveyor_api.quantities import parse_quantity
from conveyor_api.scheduling import Name

_NAME_PATTERN: Final = "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
_PATH_PATTERN: Final = "^(/[A-Za-z0-9_@+=.-]+)+$"
_DOTS_PATTERN: Final = "/[.]{1,2}(/|$)"
_KINDS: Final = ("configMap", "secret", "persistentVolumeClaim", "emptyDir", "csi", "ephemeral")
# Folders of the system, and folders that Conveyor uses.
_TAKEN_PATTERN: Final = "^/(etc$|etc/conveyor(/|$)|(dev|proc|sys|tmp|models)(/|$))"


def _is_size(text: str) -> bool:
    try:
        return parse_quantity(text) > 0
    except ValueError:
        return False


# A string, not a Quantity, which may also be a number. In a list, a rule on a string costs less than one on a Quantity.
SizeLimit = Annotated[
    str,
    Field(max_length=20),
    Rule(
        "isQuantity(self) && quantity(self).isGreaterThan(quantity('0'))",
        "must be more than 0, for example 1Gi",
        _is_size,
    ),
]


class KeyToPath(ApiModel):
    """One key as a file."""

    key: Name
    """Key of the value."""
    path: Annotated[str, Field(min_length=1, max_length=512)]
    """Path of the file within the volume."""


KeysToPaths = Annotated[list[KeyToPath], Field(max_length=64)]


class ConfigMapVolume(ApiModel):
    """The keys of a ConfigMap as files."""

    name: Name
    """Name of the ConfigMap."""
    items: KeysToPaths = Field(default_factory=list)
    """Keys to include, with their files; default: all keys, each as a file with its name."""
    optional: bool | None = None
    """Start without the files if the ConfigMap is missing."""


class SecretVolume(ApiModel):
    """The keys of a Secret as files."""

    secret_name: Name
    """Name of the Secret."""
    items: KeysToPaths = Field(default_factory=list)
    """Keys to include, with their files; default: all keys, each as a file with its name."""
    optional: bool | None = None
    """Start without the files if the Secret is missing."""


class ClaimVolume(ApiModel):
    """A PersistentVolumeClaim."""

    claim_name: Name
    """Name of the claim."""
    read_only: bool | None = None
    """Mount it read-only."""


class EmptyDirVolume(ApiModel):
    """A folder that is deleted with the pod."""

    size_limit: SizeLimit
    """Limit of the folder's size. If it is exceeded, the pod is evicted."""
    medium: Literal["Memory"] | None = None
    """Memory: keep the folder in memory, which counts towards the pod's memory limit; default: on the node's disk."""


class SecretReference(ApiModel):
    """A Secret of the namespace."""

    name: Name
    """Name of the Secret."""


class CSIVolume(ApiModel):
    """A volume that a CSI driver provides for each pod, for example secrets of a vault or certificates."""

    driver: Name
    """Name of the driver, for example `secrets-store.csi.k8s.io`."""
    read_only: bool | None = None
    """Mount it read-only. Some drivers require this."""
    volume_attributes: Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=32)] = Field(
        default_factory=dict
    )
    """Parameters for the driver."""
    node_publish_secret_ref: SecretReference | None = None
    """Secret that the driver gets."""


class ClaimRequests(ApiModel):
    """Resources of a claim."""

    storage: SizeLimit
    """Size of the volume."""


class ClaimResources(ApiModel):
    """Resources of a claim."""

    requests: ClaimRequests
    """The amounts."""


class ClaimSpec(ApiModel):
    """The desired claim."""

    access_modes: Annotated[list[Literal["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"]], Field(max_length=1)]
    """How the volume may be mounted, usually `[ReadWriteOnce]`."""
    storage_class_name: Name | None = None
    """StorageClass; default: the cluster's."""
    resources: ClaimResources
    """Size of the volume."""


class ClaimTemplate(ApiModel):
    """The claim that each pod gets."""

    spec: ClaimSpec
    """The desired claim."""


class EphemeralVolume(ApiModel):
    """A volume of a StorageClass for each pod, which is deleted with the pod."""

    volume_claim_template: ClaimTemplate
    """The claim that each pod gets."""


class Volume(ApiModel):
    """One volume of the pods, of exactly one kind.

    An emptyDir with the name `shared-memory` or `scratch` replaces Conveyor's own, which is at `/dev/shm` or `/tmp`."""

    rules: ClassVar = (
        Rule(
            f"[{', '.join(f'has(self.{kind})' for kind in _KINDS)}].exists_one(given, given)",
            f"a volume needs exactly one of {', '.join(_KINDS[:-1])} and {_KINDS[-1]}",
            lambda volume: sum(getattr(volume, to_snake(kind)) is not None for kind in _KINDS) == 1,
        ),
        Rule(
            f"!(self.name in {list(names.REPLACEABLE_VOLUMES)}) || has(self.emptyDir)",
            f"{' and '.join(names.REPLACEABLE_VOLUMES)} replace Conveyor's own volumes, so they must be an emptyDir",
            lambda volume: volume.name not in names.REPLACEABLE_VOLUMES or volume.empty_dir is not None,
        ),
    )

    name: Annotated[
        str,
        Field(max_length=63),
        Rule(
            f"self.matches('{_NAME_PATTERN}')",
            "must be the name of a volume: small letters, digits and -",
            lambda name: re.fullmatch(_NAME_PATTERN, name) is not None,
        ),
        Rule(
            f"!(self in {list(names.FIXED_VOLUMES)})",
            f"must not be the name of one of Conveyor's own volumes: {', '.join(names.FIXED_VOLUMES)}",
            lambda name: name not in names.FIXED_VOLUMES,
        ),
    ]
    """Name that `volumeMounts` use."""
    config_map: ConfigMapVolume | None = None
    """The keys of a ConfigMap as files."""
    secret: SecretVolume | None = None
    """The keys of a Secret as files."""
    persistent_volume_claim: ClaimVolume | None = None
    """A PersistentVolumeClaim."""
    empty_dir: EmptyDirVolume | None = None
    """A folder that is deleted with the pod."""
    csi: CSIVolume | None = None
    """A volume that a CSI driver provides for each pod."""
    ephemeral: EphemeralVolume | None = None
    """A volume of a StorageClass for each pod, which is deleted with the pod."""


class VolumeMount(ApiModel):
    """A mount point of a volume, in the engine and in the model download."""

    name: Annotated[str, Field(min_length=1, max_length=63)]
    """Name of the volume."""
    mount_path: Annotated[
        str,
        Field(max_length=512),
        Rule(
            f"self.matches('{_PATH_PATTERN}') && !self.matches('{_DOTS_PATTERN}')",
            "must be an absolute path such as /etc/ssl/certs/team.crt",
            lambda path: re.fullmatch(_PATH_PATTERN, path) is not None and re.search(_DOTS_PATTERN, path) is None,
        ),
        Rule(
            f"!self.matches('{_TAKEN_PATTERN}')",
            "is taken: /etc, /etc/conveyor, /dev, /proc, /sys, /tmp and /models belong to the system and to Conveyor",
            lambda path: re.search(_TAKEN_PATTERN, path) is None,
        ),
    ]
    """Path in the container: a folder, or a file if `subPath` names one."""
    sub_path: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """Path within the volume; default: the whole volume."""
    read_only: bool | None = None
    """Mount it read-only."""


Volumes = Annotated[list[Volume], Field(max_length=16), KeyedBy("name")]
VolumeMounts = Annotated[list[VolumeMount], Field(max_length=16), KeyedBy("mountPath")]
