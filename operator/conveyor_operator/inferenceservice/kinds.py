"""The InferenceService, its children, and what is made for them: which kinds, and in which order they are applied."""

from conveyor_api import names
from conveyor_operator.kinds import (
    AUTOSCALER,
    CLAIM,
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    ENDPOINT_SLICE,
    JOB,
    NETWORK_POLICY,
    POD,
    REPLICA_SET,
    SCALED_OBJECT,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
)

INFERENCE_SERVICE = Kind(names.GROUP, names.VERSION, names.KIND, names.PLURAL)

# In the order in which they are applied: what pods need comes before the pods, what counts them after.
CHILDREN = (
    SERVICE_ACCOUNT, CLAIM, CONFIG_MAP, SERVICE, NETWORK_POLICY, JOB, DEPLOYMENT, DISRUPTION_BUDGET, AUTOSCALER,
    SCALED_OBJECT,
)  # fmt: skip

# Of those, the ones that not every cluster has.
OPTIONAL = (SCALED_OBJECT,)

# Made by controllers for our children; read for the status.
GRANDCHILDREN = (REPLICA_SET, POD, ENDPOINT_SLICE)
