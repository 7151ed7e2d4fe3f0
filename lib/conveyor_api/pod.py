"""`spec.pod`: settings of the engine's pods, with Kubernetes' own names.

They are copied into the pods unchanged, in addition to Conveyor's own settings, which they cannot replace. Every member
is typed and limited. An untyped member would let a tenant put JSON of any depth into an object that all processes read.
"""

import re
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from conveyor_api import names
from conveyor_api.base import ApiModel, KeyedBy, Rule, TenantRule
from conveyor_api.env import Env
from conveyor_api.scheduling import Affinity, Label, Labels, Name, Toleration, TopologySpreadConstraint
from conveyor_api.volumes import VolumeMounts, Volumes

_OWN_LABELS: Final = [name for name in names.child_labels("") if not name.startswith(names.GROUP)]

Id = Annotated[int, Field(ge=1, le=2_147_483_647)]

OwnLabels = Annotated[
    dict[str, Label],
    Field(max_length=32),
    Rule(
        f"self.all(key, !key.startsWith('{names.GROUP}/') && !(key in {_OWN_LABELS}))",
        f"must not contain Conveyor's own labels: those of {names.GROUP}/, and {_OWN_LABELS[0].partition('/')[0]}/ "
        f"with {', '.join(name.partition('/')[2] for name in _OWN_LABELS)}",
        lambda labels: not any(key.startswith(f"{names.GROUP}/") or key in _OWN_LABELS for key in labels),
    ),
]

# Annotations that Kubernetes, container runtimes and network plug-ins read. Some switch off what "restricted" demands:
# AppArmor's and seccomp's profiles, devices by CDI and NRI, the runtime's options, Multus' networks, Istio's volumes.
_OF_THE_NODE: Final = (
    r"(^|[.])(kubernetes[.]io|k8s[.]io|cncf[.]io|crio[.]io|cri-o[.]io|containerd[.]io|nri[.]io|multus-cni[.]io"
    r"|networking[.]gke[.]io|projectcalico[.]org|cilium[.]io|ovn[.]org)(/|$)"
    r"|^(io[.]kubernetes|io[.]containerd|io[.]katacontainers|io[.]cilium|dev[.]gvisor|org[.]systemd|run[.]oci)[.]"
    r"|^sidecar[.]istio[.]io/userVolume"
)
_HARMLESS: Final = r"^(cluster-autoscaler|kubectl)[.]kubernetes[.]io/"

Annotations = Annotated[
    dict[str, Annotated[str, Field(max_length=4096)]],
    Field(max_length=32),
    Rule(
        f"self.all(key, !key.startsWith('{names.GROUP}/'))",
        f"must not contain Conveyor's own annotations, those of {names.GROUP}/",
        lambda annotations: not any(key.startswith(f"{names.GROUP}/") for key in annotations),
    ),
]

PodAnnotations = Annotated[
    Annotations,
    TenantRule(
        f"self.all(key, !key.matches('{_OF_THE_NODE}') || key.matches('{_HARMLESS}'))",
        "must not contain annotations that Kubernetes, the container runtime or the network plug-in reads, except "
        "those of cluster-autoscaler.kubernetes.io/ and kubectl.kubernetes.io/: some of them weaken a pod; a profile "
        "may set them",
        lambda annotations: all(re.search(_HARMLESS, key) or not re.search(_OF_THE_NODE, key) for key in annotations),
    ),
]


# Those of a ServiceAccount or a Service give rights of a cloud, or publish names.
GivenAnnotations = Annotated[
    Annotations,
    TenantRule("size(self) == 0", "is for profiles: clouds read such annotations", lambda annotations: not annotations),
]


class Metadata(ApiModel):
    """Labels and annotations for all objects that Conveyor creates for the service, except its pods."""

    labels: OwnLabels = Field(default_factory=dict)
    """Labels in addition to Conveyor's."""
    annotations: GivenAnnotations = Field(default_factory=dict)
    """Annotations in addition to Conveyor's, in profiles only."""


class SecurityProfile(ApiModel):
    """A profile of seccomp or AppArmor."""

    rules: ClassVar = (
        Rule(
            "(self.type == 'Localhost') == has(self.localhostProfile)",
            "type Localhost needs localhostProfile, and RuntimeDefault has none",
            lambda profile: (profile.type == "Localhost") == (profile.localhost_profile is not None),
        ),
    )

    type: Literal["RuntimeDefault", "Localhost"]
    """RuntimeDefault: the container runtime's profile. Localhost: a profile that the node has."""
    localhost_profile: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """The node's profile: its path below the kubelet's folder for seccomp, its name for AppArmor."""


class SELinuxOptions(ApiModel):
    """The SELinux context of the processes."""

    level: Annotated[str, Field(min_length=1, max_length=253)]
    """Level, for example `s0:c123,c456`."""


class PodSecurityContext(ApiModel):
    """The user and groups of the pods, and profiles of the node. Pods never run as root."""

    run_as_user: Id | None = None
    """User of the processes; default: the installation's."""
    run_as_group: Id | None = None
    """Group of the processes; default: the installation's."""
    fs_group: Id | None = None
    """Group that owns the files of volumes; default: the installation's, but none for a `pvc://` model."""
    fs_group_change_policy: Literal["OnRootMismatch", "Always"] | None = None
    """When the files get that group; default OnRootMismatch."""
    supplemental_groups: Annotated[list[Id], Field(max_length=16)] = Field(default_factory=list)
    """Further groups of the processes."""
    seccomp_profile: SecurityProfile | None = None
    """Seccomp profile; default: the runtime's."""
    app_armor_profile: SecurityProfile | None = None
    """AppArmor profile; default: the node's choice."""
    se_linux_options: SELinuxOptions | None = None
    """SELinux context; default: the runtime's choice."""


class ImagePullSecret(ApiModel):
    """A Secret with the credentials of an image registry."""

    name: Name
    """Name of the Secret."""


class ResourceClaim(ApiModel):
    """A device by dynamic resource allocation. The engine gets all of these devices, the model download none."""

    rules: ClassVar = (
        Rule(
            "has(self.resourceClaimName) != has(self.resourceClaimTemplateName)",
            "a resource claim needs exactly one of resourceClaimName and resourceClaimTemplateName",
            lambda claim: (claim.resource_claim_name is None) != (claim.resource_claim_template_name is None),
        ),
    )

    name: Annotated[str, Field(min_length=1, max_length=63)]
    """Name of the claim within the pod."""
    resource_claim_name: Name | None = None
    """ResourceClaim that all pods share."""
    resource_claim_template_name: Name | None = None
    """ResourceClaimTemplate from which each pod gets a claim of its own."""


class DNSOption(ApiModel):
    """One option of the resolver."""

    name: Annotated[str, Field(min_length=1, max_length=63)]
    """Name of the option, for example `ndots`."""
    value: Annotated[str, Field(max_length=63)] | None = None
    """Its value."""


class DNSConfig(ApiModel):
    """Settings of the resolver, in addition to the cluster's."""

    nameservers: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=3)] = Field(
        default_factory=list
    )
    """Addresses of name servers."""
    searches: Annotated[list[Name], Field(max_length=32)] = Field(default_factory=list)
    """Search domains."""
    options: Annotated[list[DNSOption], Field(max_length=16)] = Field(default_factory=list)
    """Options of the resolver."""


class HostAlias(ApiModel):
    """Host names for an address, which each pod has in /etc/hosts."""

    ip: Annotated[str, Field(min_length=1, max_length=64)]
    """The address."""
    hostnames: Annotated[list[Name], Field(max_length=16)] = Field(default_factory=list)
    """The names."""


class Pod(ApiModel):
    """Settings of the engine's pods, copied into the pod template unchanged."""

    rules: ClassVar = (
        Rule(
            "!has(self.volumeMounts) || self.volumeMounts.all(mount,"
            " has(self.volumes) && self.volumes.exists(volume, volume.name == mount.name))",
            "volumeMounts must name volumes of pod.volumes",
            lambda pod: {mount.name for mount in pod.volume_mounts} <= {volume.name for volume in pod.volumes},
            field="volumeMounts",
        ),
    )

    labels: OwnLabels = Field(default_factory=dict)
    """Labels in addition to Conveyor's."""
    annotations: PodAnnotations = Field(default_factory=dict)
    """Annotations in addition to Conveyor's."""
    service_account_name: Name | None = None
    """ServiceAccount of the pods; default: one that Conveyor creates. Its token is never mounted."""
    node_selector: Labels = Field(default_factory=dict)
    """Labels that a node must have."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = Field(default_factory=list)
    """Taints that the pods accept."""
    affinity: Affinity | None = None
    """Nodes and pods that attract or repel the pods."""
    topology_spread_constraints: Annotated[list[TopologySpreadConstraint], Field(max_length=16)] = Field(
        default_factory=list
    )
    """How evenly the pods are spread."""
    priority_class_name: Name | None = None
    """PriorityClass of the pods."""
    runtime_class_name: Name | None = None
    """RuntimeClass of the pods, for example `nvidia`."""
    scheduler_name: Name | None = None
    """Scheduler of the pods; default: the cluster's."""
    host_users: bool | None = None
    """False: the pods have users of their own, which have no rights on the node."""
    dns_config: DNSConfig | None = None
    """Settings of the resolver."""
    host_aliases: Annotated[list[HostAlias], Field(max_length=16), KeyedBy("ip")] = Field(default_factory=list)
    """Entries of /etc/hosts."""
    security_context: PodSecurityContext = PodSecurityContext()
    """User and groups of the pods."""
    image_pull_secrets: Annotated[list[ImagePullSecret], Field(max_length=16), KeyedBy("name")] = Field(
        default_factory=list
    )
    """Secrets with the credentials of image registries."""
    env: Env = Field(default_factory=list)
    """Environment variables of the engine and of the model download."""
    volumes: Volumes = Field(default_factory=list)
    """Further volumes."""
    volume_mounts: VolumeMounts = Field(default_factory=list)
    """Mount points of the volumes, in the engine and in the model download."""
    resource_claims: Annotated[list[ResourceClaim], Field(max_length=8), KeyedBy("name")] = Field(default_factory=list)
    """Devices by dynamic resource allocation."""

    def to_manifest(self) -> dict[str, Any]:
        """Return the fields that were set, without defaults: an absent selector and an empty one differ in meaning."""
        return self.model_dump(exclude_unset=True, exclude_none=True)
