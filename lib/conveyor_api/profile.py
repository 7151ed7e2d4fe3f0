"""A profile: settings of the platform team for the services that name it. The chart installs it."""

from typing import Annotated

from pydantic import Field

from conveyor_api.access import Namespace
from conveyor_api.base import ApiModel
from conveyor_api.pod import Metadata, Pod
from conveyor_api.resources import Resources


class Profile(ApiModel):
    """The parts of a spec that a profile may set, and who may have it."""

    namespaces: Annotated[list[Namespace], Field(max_length=1000)] = Field(default_factory=list)
    """Namespaces whose services may have the profile; empty: all."""
    metadata: Metadata = Metadata()
    """Labels and annotations for all objects that Conveyor creates for the service, except its pods."""
    resources: Resources = Resources()
    """Resources of the engine's container."""
    pod: Pod = Pod()
    """Settings of the engine's pods."""
