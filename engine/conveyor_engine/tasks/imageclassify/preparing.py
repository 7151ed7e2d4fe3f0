"""Makes an engine request for each image in a body. Runs in worker processes."""

from collections.abc import Mapping
from typing import Final, cast

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.images.decoding import read_base64
from conveyor_engine.serving.preparing.forms import is_form, parse_form
from conveyor_engine.serving.preparing.jobs import BodyKind, ServedModel, name_input, parse_body
from conveyor_engine.serving.preparing.open_inference import PreparedInference, prepare_inference
from conveyor_engine.serving.preparing.pictures import IMAGES_MAX, build_kind, process_picture, read_files
from conveyor_engine.serving.preparing.prompts import PreparedPrompts, Prompt, check_answer_size
from conveyor_engine.tasks.imageclassify.bodies import TOP_K, ImageClassificationRequest, ImageOptions
from conveyor_engine.tasks.imageclassify.tensors import IMAGE, PIXELS, read_signature
from conveyor_engine.wire.classification import Activation
from conveyor_engine.wire.images import ImageFacts, PictureShape, encode_pixels
from conveyor_engine.wire.tensors import Tensor, decode_elements
from conveyor_engine.wire.worker import Job


class PreparedImages(PreparedPrompts, frozen=True, kw_only=True, array_like=True):
    """A valid request, with a prompt for each image, in order."""

    activation: Activation  # the function that turns logits into scores
    top_k: int


def prepare_images(model: ServedModel, job: Job) -> PreparedImages:
    """Prepare a body of /v1/images/classify. Raises InvalidRequest or UnknownModel."""
    fields: ImageOptions
    if is_form(job.content_type):
        fields, files = parse_form(model, ImageOptions, job, "image", IMAGES_MAX)
        param, number, encoded = "image", len(files), iter(files)
    else:
        fields = parse_body(model, ImageClassificationRequest, job.body)
        param, number, encoded = "images", len(fields.images), read_files(fields.images, "images")
    facts = ImageFacts.read(job.facts)
    check_answer_size(number, len(facts.labels), "labels", param)
    prompts = [_read_image(model, job, data, name_input(param, index, number)) for index, data in enumerate(encoded)]
    named = fields.function_to_apply
    activation = facts.activation if named in (None, "default") else cast(Activation, named)
    top_k = TOP_K if fields.top_k is None else fields.top_k
    return PreparedImages.of("image", prompts, job, fields, param, activation=activation, top_k=top_k)


def prepare_image_tensors(model: ServedModel, job: Job) -> PreparedInference:
    """Prepare a body of the Open Inference Protocol. Raises InvalidRequest or UnknownModel."""
    facts = ImageFacts.read(job.facts)

    def make_prompt(tensors: dict[str, Tensor], name: str) -> Prompt:
        if len(tensors) != 1:
            raise InvalidRequest(f"inputs must have either {IMAGE} or {PIXELS}, not both", param="inputs")
        if PIXELS in tensors:
            return Prompt([], encode_pixels(facts.shape, tensors[PIXELS].data), facts.shape.num_pixels)
        (data,) = decode_elements(tensors[IMAGE].data)
        return _read_image(model, job, read_base64(data.decode(), name) if data.isascii() else data, name)

    return prepare_inference(model, job, read_signature(job.facts), make_prompt, IMAGES_MAX)


def _read_image(model: ServedModel, job: Job, data: bytes, param: str) -> Prompt:
    pixels = process_picture(model, data, param)
    shape = PictureShape(*pixels.shape)
    if shape.num_pixels > job.facts.max_model_len:
        message = (
            f"{param} becomes {shape.width} x {shape.height} pixels, and at most {job.facts.max_model_len} are allowed"
        )
        raise InvalidRequest(f"{message}: make it closer to a square", param=param)
    return Prompt([], encode_pixels(shape, pixels.tobytes()), shape.num_pixels)


TASK: Final[Mapping[str, BodyKind]] = {
    "images": build_kind(prepare_images, PreparedImages),
    "image_tensors": build_kind(prepare_image_tensors, PreparedInference),
}
