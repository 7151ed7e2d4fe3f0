"""The scheduling fields of `spec.pod`, with the meaning that they have in a pod's spec.

Every member is typed and bounded here. An untyped one would let a tenant put JSON of any depth and width into an
object that all of Conveyor's processes read, and let a mistake through that only the Deployment's apply would find.
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
    """Nodes that match one term or more."""

    node_selector_terms: Annotated[list[NodeTerm], Field(min_length=1, max_length=16)]
    """The terms."""


class PreferredNodes(ApiModel):
    """Nodes that are better than others."""

    weight: Weight
    """How much better."""
    preference: NodeTerm
    """Which nodes."""


class NodeAffinity(ApiModel):
    """On which nodes the pods may run."""

    required_during_scheduling_ignored_during_execution: RequiredNodes | None = None
    """Only on these nodes."""
    preferred_during_scheduling_ignored_during_execution: Annotated[list[PreferredNodes], Field(max_length=16)] = Field(
        default_factory=list
    )
    """Rather on these nodes."""


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
    """Pods near which, or away from which, the pods run."""

    topology_key: Key
    """Node label that says what is near, for example `kubernetes.io/hostname`."""
    label_selector: LabelSelector | None = None
    """Which pods."""
    match_label_keys: LabelKeys = Field(default_factory=list)
    """Labels in which those pods must equal the engine's own."""
    mismatch_label_keys: LabelKeys = Field(default_factory=list)
    """Labels in which they must differ."""
    namespaces: Annotated[list[Annotated[str, Field(max_length=63)]], Field(max_length=32)] = Field(
        default_factory=list
    )
    """In which namespaces; default: the service's own."""
    namespace_selector: LabelSelector | None = None
    """Further namespaces, by label."""


class WeightedPodTerm(ApiModel):
    """A term that is preferred."""

    weight: Weight
    """How much."""
    pod_affinity_term: PodTerm
    """The term."""


class PodAffinity(ApiModel):
    """Nearness to other pods."""

    required_during_scheduling_ignored_during_execution: Annotated[list[PodTerm], Field(max_length=16)] = Field(
        default_factory=list
    )
    """All of these terms must hold."""
    preferred_during_scheduling_ignored_during_execution: Annotated[list[WeightedPodTerm], Field(max_length=16)] = (
        Field(default_factory=list)
    )
    """These terms rather hold."""


class Affinity(ApiModel):
    """Nodes and pods that attract or repel the pods."""

    node_affinity: NodeAffinity | None = None
    """On which nodes they may run."""
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
    """Most pods that one group may have more than another."""
    topology_key: Key
    """Node label that forms the groups."""
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]
    """Action for a pod that would exceed `maxSkew`."""
    label_selector: LabelSelector | None = None
    """Which pods are counted."""
    match_label_keys: LabelKeys = Field(default_factory=list)
    """Labels in which counted pods must equal the engine's own."""
    min_domains: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Least number of groups."""
    node_affinity_policy: Literal["Honor", "Ignore"] | None = None
    """Whether only nodes that the pods may run on are counted; default Honor."""
    node_taints_policy: Literal["Honor", "Ignore"] | None = None
    """Whether only nodes whose taints are tolerated are counted; default Ignore."""


class Toleration(ApiModel):
    """A taint that the pods accept. The taint `nvidia.com/gpu` is tolerated already when a GPU is asked for."""

    key: Annotated[str, Field(max_length=317)] | None = None
    """Key of the taint; none with operator Exists tolerates all."""
    operator: Annotated[str, Field(max_length=16)] | None = None
    """Equal (Kubernetes' default), Exists, or another that the cluster knows."""
    value: Label | None = None
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; none means all."""
    toleration_seconds: Annotated[int, Field(ge=0)] | None = None
    """How long a pod stays after a NoExecute taint appears."""
