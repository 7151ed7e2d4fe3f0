"""The scheduling fields of `spec.pod`, with the same meaning as in a pod's spec.

Every member is typed and limited here. An untyped member would let a tenant put JSON of any size into an object that
all of Conveyor's processes read. Mistakes in it would only be found when the Deployment is applied.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from conveyor_api.base import ApiModel, Rule

Name = Annotated[str, Field(min_length=1, max_length=253)]
Key = Annotated[str, Field(min_length=1, max_length=317)]
Label = Annotated[str, Field(max_length=63)]
Labels = Annotated[dict[str, Label], Field(max_length=32)]
Weight = Annotated[int, Field(ge=1, le=100)]


class NodeRequirement(ApiModel):
    """One condition on a node's labels or fields."""

    key: Key
    """Label key, or field such as `metadata.name`."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    """How the value is compared."""
    values: Annotated[list[Label], Field(max_length=64)] = Field(default_factory=list)
    """Values for In and NotIn; one whole number for Gt and Lt; none otherwise."""


NodeRequirements = Annotated[list[NodeRequirement], Field(max_length=16)]


class NodeTerm(ApiModel):
    """Nodes for which all conditions hold."""

    match_expressions: NodeRequirements = Field(default_factory=list)
    """Conditions on labels."""
    match_fields: NodeRequirements = Field(default_factory=list)
    """Conditions on fields."""


class RequiredNodes(ApiModel):
    """Nodes that match at least one term."""

    node_selector_terms: Annotated[list[NodeTerm], Field(min_length=1, max_length=16)]
    """The terms."""


class PreferredNodes(ApiModel):
    """Nodes that are preferred to others."""

    weight: Weight
    """Weight of the preference."""
    preference: NodeTerm
    """The preferred nodes."""


class NodeAffinity(ApiModel):
    """Nodes on which the pods may run."""

    required_during_scheduling_ignored_during_execution: RequiredNodes | None = None
    """The pods run only on these nodes."""
    preferred_during_scheduling_ignored_during_execution: Annotated[list[PreferredNodes], Field(max_length=16)] = Field(
        default_factory=list
    )
    """The pods run on these nodes if possible."""


class LabelRequirement(ApiModel):
    """One condition on labels."""

    key: Key
    """Label key."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """How the value is compared."""
    values: Annotated[list[Label], Field(max_length=64)] = Field(default_factory=list)
    """Values for In and NotIn; none otherwise."""


class LabelSelector(ApiModel):
    """Objects with these labels; an empty selector means all."""

    match_labels: Labels = Field(default_factory=dict)
    """Labels that must be equal."""
    match_expressions: Annotated[list[LabelRequirement], Field(max_length=16)] = Field(default_factory=list)
    """Further conditions."""


LabelKeys = Annotated[list[Key], Field(max_length=16)]


class PodTerm(ApiModel):
    """Pods near which, or away from which, the pods must run."""

    topology_key: Key
    """Node label whose equal values mean near, for example `kubernetes.io/hostname`."""
    label_selector: LabelSelector | None = None
    """The pods; default: the engines of this service."""
    match_label_keys: LabelKeys = Field(default_factory=list)
    """Labels whose values must equal those of the engine's pods."""
    mismatch_label_keys: LabelKeys = Field(default_factory=list)
    """Labels whose values must differ from those of the engine's pods."""
    namespaces: Annotated[list[Annotated[str, Field(max_length=63)]], Field(max_length=32)] = Field(
        default_factory=list
    )
    """Namespaces of the pods; default: the service's own."""
    namespace_selector: LabelSelector | None = None
    """Further namespaces, by label."""


class WeightedPodTerm(ApiModel):
    """A term that is preferred."""

    weight: Weight
    """Weight of the preference."""
    pod_affinity_term: PodTerm
    """The term."""


class PodAffinity(ApiModel):
    """Rules about other pods."""

    required_during_scheduling_ignored_during_execution: Annotated[list[PodTerm], Field(max_length=16)] = Field(
        default_factory=list
    )
    """All of these terms must hold."""
    preferred_during_scheduling_ignored_during_execution: Annotated[list[WeightedPodTerm], Field(max_length=16)] = (
        Field(default_factory=list)
    )
    """These terms hold if possible."""


class Affinity(ApiModel):
    """Nodes and pods that attract or repel the pods."""

    node_affinity: NodeAffinity | None = None
    """Nodes on which they may run."""
    pod_affinity: PodAffinity | None = None
    """Pods to be near."""
    pod_anti_affinity: PodAffinity | None = None
    """Pods to be away from."""


class TopologySpreadConstraint(ApiModel):
    """How evenly the pods are spread over nodes, zones or other groups of nodes."""

    rules: ClassVar = (
        Rule(
            "!has(self.minDomains) || self.whenUnsatisfiable == 'DoNotSchedule'",
            "minDomains needs whenUnsatisfiable: DoNotSchedule",
            lambda spread: spread.min_domains is None or spread.when_unsatisfiable == "DoNotSchedule",
        ),
    )

    max_skew: Annotated[int, Field(ge=1, le=10_000)]
    """Maximum difference between the numbers of pods in two groups."""
    topology_key: Key
    """Node label that forms the groups."""
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]
    """Action for a pod that would exceed `maxSkew`."""
    label_selector: LabelSelector | None = None
    """The pods that are counted; default: the engines of this service."""
    match_label_keys: LabelKeys = Field(default_factory=list)
    """Labels whose values must equal those of the engine's pods for a pod to be counted."""
    min_domains: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Minimum number of groups."""
    node_affinity_policy: Literal["Honor", "Ignore"] | None = None
    """Whether only nodes that the pods may run on are counted; default Honor."""
    node_taints_policy: Literal["Honor", "Ignore"] | None = None
    """Whether only nodes whose taints are tolerated are counted; default Ignore."""


class Toleration(ApiModel):
    """A taint that the pods accept. If a GPU is requested, the taint `nvidia.com/gpu` is tolerated anyway."""

    key: Annotated[str, Field(max_length=317)] | None = None
    """Key of the taint; if it is not set, `operator: Exists` tolerates all taints."""
    operator: Annotated[str, Field(max_length=16)] | None = None
    """Equal (Kubernetes' default), Exists, or another that the cluster knows."""
    value: Label | None = None
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; if it is not set, all effects."""
    toleration_seconds: Annotated[int, Field(ge=0)] | None = None
    """How long a pod stays after a NoExecute taint appears."""
