"""Chooses the image of Conveyor's engine for a service. Pure; used by `desired`.

An upgrade of Conveyor has a new default image, but must not restart GPU pods only for this image. So a service keeps
its image until its pods are replaced for another reason: the spec changes the pods (for example, it no longer names an
image), or the new operator renders them differently. Scaling does not replace pods.

The current image is read from the Deployment. Its annotation is a hash of the image and of the template for which the
image was chosen. An image that somebody edited does not match the hash, so it is not kept. The status cannot be used,
because it is written later: the next reconcile may still read the previous image in it. With another runtime, only the
fetch container uses this image.
"""

from conveyor_api.spec import InferenceServiceSpec
from conveyor_operator.inferenceservice.observed import DeploymentState
from conveyor_operator.loop.child import hash_of
from conveyor_operator.loop.owner import Object


def choose_engine_image(
    spec: InferenceServiceSpec, template: Object, default: str, live: DeploymentState | None
) -> str:
    """Return the image. `template`: the desired pod template. `live`: the Deployment; None if it does not exist."""
    if spec.engine.image is not None and spec.runtime == "Conveyor":
        return spec.engine.image
    if live is None:
        return default
    return live.engine_image if live.template_hash == hash_template(template, live.engine_image) else default


def hash_template(template: Object, image: str) -> str:
    """Return a hash of the desired pod template and the image that was chosen for it."""
    return hash_of([template, image])
