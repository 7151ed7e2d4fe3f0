"""Builds an engine request for each picture that a body requests. Runs in worker processes."""

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.images.decoding import decode_image
from conveyor_engine.serving.preparing.forms import is_form, parse_form
from conveyor_engine.serving.preparing.jobs import BodyKind, ServedModel, parse_body
from conveyor_engine.serving.preparing.pictures import build_kind
from conveyor_engine.serving.preparing.prompts import RESULT_BYTES_MAX, PreparedPrompts, Prompt
from conveyor_engine.tasks.imagegenerate.bodies import (
    SEED_END,
    ImageEditOptions,
    ImageGenerationRequest,
    PictureOptions,
)
from conveyor_engine.tasks.imagegenerate.facts import PaintFacts, PaintRequest, Size, build_params, read_facts
from conveyor_engine.wire.worker import Job

if TYPE_CHECKING:  # the API process imports this module but not Pillow
    from PIL import Image


class PreparedPictures(PreparedPrompts, frozen=True, kw_only=True, array_like=True):
    """A valid request, with a prompt for each picture."""

    size: Size
    seeds: list[int]  # one for each picture
    stream: bool


def prepare_pictures(model: ServedModel, job: Job) -> PreparedPictures:
    """Validate a body of /v1/images/generations and build its requests. Raises InvalidRequest or UnknownModel."""
    return _prepare(model, job, parse_body(model, ImageGenerationRequest, job.body))


def prepare_edits(model: ServedModel, job: Job) -> PreparedPictures:
    """Validate a form of /v1/images/edits and build its requests. Raises InvalidRequest or UnknownModel."""
    if not is_form(job.content_type):
        raise InvalidRequest("send the picture to edit as multipart/form-data, in a part named image", param="image")
    fields, (data,) = parse_form(model, ImageEditOptions, job, "image", 1)
    return _prepare(model, job, fields, decode_image(data, "image"), fields.strength)


def _prepare(
    model: ServedModel,
    job: Job,
    fields: PictureOptions,
    image: "Image.Image | None" = None,
    strength: float | None = None,
) -> PreparedPictures:
    facts, number = read_facts(job.facts), fields.n or 1
    size = find_size(facts, fields.size, job.facts.max_num_batched_tokens, image)
    if 3 * number * size.num_pixels > RESULT_BYTES_MAX:
        most = RESULT_BYTES_MAX // (3 * size.num_pixels)
        raise InvalidRequest(f"n is {number}, but an answer has at most {most} pictures of {size}", param="n")
    num_steps = fields.num_inference_steps or facts.num_steps
    if num_steps > len(facts.nums_forwards):
        message = f"num_inference_steps must be at most {len(facts.nums_forwards)} with this model's scheduler"
        raise InvalidRequest(message, param="num_inference_steps")
    guidance = facts.guidance if fields.guidance_scale is None else fields.guidance_scale
    if fields.negative_prompt and not facts.guides:
        raise InvalidRequest("this model cannot be guided away from a prompt: leave it out", param="negative_prompt")
    has_guidance = facts.guides and guidance > 1
    tokens, num_tokens = model.reader.encode(fields.prompt)
    has_negative = has_guidance and fields.negative_prompt is not None
    negative, num_negative = model.reader.encode(fields.negative_prompt) if has_negative else ([], 0)
    first_seed = random.getrandbits(62) if fields.seed is None else fields.seed
    seeds = [first_seed + index for index in range(number)]
    if seeds[-1] >= SEED_END:
        message = f"seed must be at most {SEED_END - number}, so that the last one is below {SEED_END}"
        raise InvalidRequest(message, param="seed")
    num_skipped = 0 if image is None else _count_skipped(facts, num_steps, strength)
    num_forwards = facts.nums_forwards[num_steps - 1] - num_skipped
    pixels = b"" if image is None else image.resize(size, 1).tobytes()  # 1: Lanczos, as in diffusers
    request = PaintRequest(
        size=size,
        num_inference_steps=num_steps,
        guidance_scale=guidance,
        has_guidance=has_guidance,
        packed_tokens=tokens,
        packed_negative=negative,
        previews=_find_previews(fields.partial_images or 0, num_forwards),
        image=pixels,
        num_skipped=num_skipped,
    )
    prompt = Prompt(
        [],
        request.encode(),
        request.cost,
        num_tokens + (num_negative if fields.negative_prompt else 0),
        num_forwards,
        request.group,
    )
    prompts = [prompt._replace(params=build_params(seed)) for seed in seeds]  # one part sends what they share once
    own: dict[str, Any] = {"part_size": number, "size": size, "seeds": seeds, "stream": bool(fields.stream)}
    return PreparedPictures.of("img", prompts, job, fields, "prompt", **own)


def _count_skipped(facts: PaintFacts, num_steps: int, strength: float | None) -> int:
    """Return how many timesteps an edit leaves out. Raises InvalidRequest if none is left."""
    strength = facts.strength if strength is None else strength
    num_skipped = facts.count_skipped(num_steps, strength)
    if num_skipped == num_steps:
        message = f"strength {strength:g} leaves none of the {num_steps} num_inference_steps: raise one of them"
        raise InvalidRequest(message, param="strength")
    return num_skipped


def find_size(facts: PaintFacts, wanted: str | None, max_cost: int, image: "Image.Image | None" = None) -> Size:
    """Return the size of the pictures. Raises InvalidRequest.

    wanted: the field `size`. max_cost: the limit on the pixels of a step. image: the picture to edit, if there is one.
    """
    multiple, is_named = facts.multiple, wanted not in (None, "auto")
    if is_named:
        size = Size(*map(int, str(wanted).split("x")))
    elif image is None:
        return facts.size
    else:
        size = Size(*(max(multiple, side // multiple * multiple) for side in image.size))
    most = min(facts.max_pixels, max_cost // facts.rows)
    problem = None
    if max(size) > facts.max_side or size.num_pixels > most:
        problem = f"is too large: this model allows {most} pixels in all and {facts.max_side} pixels for a side"
    elif any(side % multiple for side in size):
        problem = f"must have sides that are multiples of {multiple} pixels"
    if problem is not None and image is not None and not is_named:
        raise InvalidRequest(f"image of {Size(*image.size)} pixels {problem}; send a smaller `size`", param="image")
    if problem is not None:
        raise InvalidRequest(f"size {size} {problem}; this model's own is {facts.size}", param="size")
    return size


def _find_previews(number: int, num_forwards: int) -> tuple[int, ...]:
    """Return the numbers of the steps after which a preview is sent, evenly spaced and without the last step.

    There are `number` previews, or fewer if there are not enough steps.
    """
    steps = {num_forwards * part // (number + 1) for part in range(1, number + 1)}
    return tuple(sorted(step for step in steps if 0 < step < num_forwards))


TASK: Final[Mapping[str, BodyKind]] = {
    "pictures": BodyKind(
        prepare_pictures, PreparedPictures, reading="validated and tokenized", advice="shorten the prompt"
    ),
    "edits": build_kind(prepare_edits, PreparedPictures),
}
