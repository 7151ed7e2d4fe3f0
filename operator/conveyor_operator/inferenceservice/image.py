"""Which image of Conveyor's engine a service runs. Pure; used by `desired`.

An upgrade of Conveyor brings a new default image, and must not restart a GPU pod for it. So a service keeps the image
it has until its pods are replaced anyway: because the spec asks something else of them, also by no longer naming an
image, or because the new operator renders them differently. Scaling is not such a change.

The Deployment says which image it has: its annotation is a hash of the image and of the template that it was chosen
for, so an image that was edited by hand does not match and is not kept. The status cannot say it: it is written later,
so the next reconcile may still read the previous image in it. With another runtime only the fetch runs in this image.
"""

from conveyor_api.spec import InferenceServiceSpec
from conveyor_operator.inferenceservice.observed import DeploymentState
from conveyor_operator.loop.child import hash_of
from conveyor_operator.loop.owner import Object


def choose_engine_image(
    spec: InferenceServiceSpec, template: Object, default: str, live: DeploymentState | None
) -> str:
    """`template` is the pods' as the spec wants it, `live` the Deployment, as far as there is one."""
    if spec.engine.image is not None and spec.runtime == "Conveyor":
        return spec.engine.image
    if live is None:
        return default
    return live.engine_image if live.template_hash == hash_template(template, live.engine_image) else default


def hash_template(template: Object, image: str) -> str:
    """Hash of the template that the spec asks for, and of the image that was chosen for it."""
    return hash_of([template, image])
