"""The kinds of the InferenceService, its children and its grandchildren, and the order of the children's applies."""

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
    ObjectKind,
)

INFERENCE_SERVICE = ObjectKind(names.GROUP, names.VERSION, names.KIND, names.PLURAL)

# In the order in which they are applied: kinds that pods need come before the Deployment, autoscalers after it.
CHILDREN = (
    SERVICE_ACCOUNT, CLAIM, CONFIG_MAP, SERVICE, NETWORK_POLICY, JOB, DEPLOYMENT, DISRUPTION_BUDGET, AUTOSCALER,
    SCALED_OBJECT,
)  # fmt: skip

# Children that must exist before the Deployment is applied, and those without which the service gets no pods.
POD_NEEDS = (SERVICE_ACCOUNT.kind, CLAIM.kind, CONFIG_MAP.kind, JOB.kind)
POD_KINDS = (*POD_NEEDS, DEPLOYMENT.kind)

# Children that not every cluster serves.
OPTIONAL = (SCALED_OBJECT,)

# Controllers create these from the children. They are read for the status.
GRANDCHILDREN = (REPLICA_SET, POD, ENDPOINT_SLICE)
