"""A profile: what the platform team gives to the services that name it. It comes with the installation."""

from conveyor_api.base import ApiModel
from conveyor_api.pod import Pod
from conveyor_api.resources import Resources


class Profile(ApiModel):
    """The parts of a spec that a profile may say, as they stand there."""

    resources: Resources = Resources()
    """Resources of the engine's container."""
    pod: Pod = Pod()
    """Settings of the engine's pods."""
