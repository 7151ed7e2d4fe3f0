"""Finds out whether a model reads images, and checks that it gives the logits of transformers' own code for them.

The runner calls `open_sight` once, before `fuse`. transformers computes a prompt with an image from pixels in one
forward, and the engine in two parts, from features and with its own positions and caches. The parts meet within the
image, or before it if its tokens see each other.
"""

import inspect
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from PIL import Image
from transformers import PreTrainedModel, __version__

from conveyor_engine.errors import ModelError
from conveyor_engine.execution.attention import interface
from conveyor_engine.execution.attention.backend import LayerShape
from conveyor_engine.execution.attention.interface import PagedStep
from conveyor_engine.execution.attention.torch_paged import TorchPaged
from conveyor_engine.execution.batch import lay_out
from conveyor_engine.execution.largest_step import measure_resident, measure_step
from conveyor_engine.execution.models import checks
from conveyor_engine.execution.models.last_layer import lay_in_block
from conveyor_engine.execution.models.quantized.deferred import stand_ins
from conveyor_engine.execution.models.towers import Tower
from conveyor_engine.execution.start import Progress, RunnerStart
from conveyor_engine.execution.states import Shapes, States
from conveyor_engine.tasks.generate.chat_pictures import ChatPictures, load_chat_pictures
from conveyor_engine.tasks.generate.execution.sight import Ahead, Sight, unpack
from conveyor_engine.wire.pictures import Picture, PictureSpan, PlacedPicture, encode_pictures
from conveyor_engine.wire.request import NO_IMAGES, SamplingParams
from conveyor_engine.wire.step import AdmittedRow, RowSampling, StepPlan

_SIZE = (96, 64)  # pixels
_NUM_TOKENS = 5  # before the picture, and behind it
# Largest relative error of the logits, as in `state_trial`.
_TOLERANCE_FLOAT32, _TOLERANCE_HALF = 1e-2, 0.15


@stand_ins()
def open_sight(
    model: PreTrainedModel, towers: list[Tower], start: RunnerStart, layers: list[LayerShape], shapes: Shapes
) -> tuple[Sight | None, str]:
    """Return the model's encoders, closed; or None, and why the engine serves the model without images."""
    if not towers:
        return None, NO_IMAGES
    try:
        reader = load_chat_pictures(Path(start.config.model))
        if "mm_encoder_outputs" not in inspect.signature(model.base_model.forward).parameters:
            raise ModelError(f"{type(model).__name__} of transformers {__version__} takes no encoded images")
        sight = Sight(model, towers, reader.place_id)
        try:
            _check_sight(sight, reader, layers, shapes)
            if start.config.warmup or model.device.type == "cuda":
                sight.step_bytes = _measure_largest(sight, reader.read_largest(), start.progress)
        finally:
            sight.close()
    except ModelError as error:
        return None, f"this engine serves the model without images: {error}"
    return sight, ""


def _measure_largest(sight: Sight, largest: Picture, progress: Progress) -> int:
    """Return the bytes that the encoder needs for the largest image. On a CPU, the first run also loads the weights."""
    device, began = sight.model.device, time.monotonic()
    read_bytes = sum(len(tensor.data) for tensor in largest.tensors.values())
    progress(f"event=largest_image_begun mib={read_bytes / 2**20:.0f}")
    if device.type == "cpu":
        needed = measure_resident(lambda: sight.encode(largest))
    else:
        size = "an image of two megapixels"
        needed = measure_step(device, size, "the weights' precision", lambda: sight.encode(largest))
    progress(f"event=largest_image_encoded seconds={time.monotonic() - began:.1f} mib={needed / 2**20:.0f}")
    return needed


def _check_sight(sight: Sight, reader: ChatPictures, layers: list[LayerShape], shapes: Shapes) -> None:
    """Raise ModelError if the model cannot run with pictures, or gives other results than transformers."""
    model, random = sight.model, Random(0)
    picture, text = reader.read(Image.frombytes("RGB", _SIZE, random.randbytes(3 * _SIZE[0] * _SIZE[1])))
    vocab_size = model.get_input_embeddings().num_embeddings
    around = [[random.randrange(vocab_size) for _ in range(_NUM_TOKENS)] for _ in range(2)]
    tokens = [token for part in around for token in part if token != sight.place_id]
    tokens[_NUM_TOKENS:_NUM_TOKENS] = reader.encode(text)
    problem = f"{type(model).__name__} cannot be run with images"
    expected, found = checks.run_once(
        problem,
        lambda: (_compute_whole(sight, tokens, picture), _compute_parts(sight, tokens, picture, layers, shapes)),
    )
    tolerance = _TOLERANCE_FLOAT32 if expected.dtype == torch.float32 else _TOLERANCE_HALF
    if not float((expected.float() - found.float()).norm() / expected.float().norm()) < tolerance:
        raise ModelError(f"this engine computes other answers for images than transformers' {type(model).__name__}")


def _compute_whole(sight: Sight, tokens: list[int], picture: Picture) -> torch.Tensor:
    model = sight.model
    input_ids = torch.tensor([tokens], device=model.device)
    inputs: dict[str, Any] = {name: unpack(picture, name).to(model.device) for name in picture.tensors}
    inputs = {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    types = (input_ids == sight.place_id).int()
    named = {"mm_token_type_ids": types, "token_type_ids": types}
    inputs |= {name: value for name, value in named.items() if name in sight.forward_inputs}
    interface.use_transformers_attention(model)
    sight.ahead = _find_ahead(model)
    sight.plain_id = _find_plain(model, sight.place_id)
    logits: torch.Tensor = model(input_ids=input_ids, use_cache=False, **inputs).logits[0]
    model.set_attn_implementation(interface.IMPLEMENTATION)
    sight.use_own_attention()
    return logits


def _find_plain(model: PreTrainedModel, place_id: int) -> int:
    """Return the token whose embedding a placeholder in a text has: itself, or padding in its place."""
    embedded: list[torch.Tensor] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, arguments: embedded.append(arguments[0]))
    try:
        model(input_ids=torch.tensor([[place_id]], device=model.device), use_cache=False)
    finally:
        hook.remove()
    return int(embedded[0])


def _find_ahead(model: PreTrainedModel) -> Ahead:
    """Return where tokens of an image see later ones, by transformers' masks for a text with an image of two tokens."""
    make = getattr(model, "create_masks_for_generate", None)
    if make is None:
        return Ahead.NOWHERE
    types = torch.tensor([[0, 1, 1, 0]], device=model.device)
    embedded = torch.zeros((*types.shape, 1), dtype=model.dtype, device=model.device)
    masks: Any = make(model.config, embedded, None, None, None, token_type_ids=types, mm_token_type_ids=types)
    masks = masks if isinstance(masks, dict) else {"full_attention": masks}
    kinds = {kind for kind, mask in masks.items() if mask is not None and _is_seen(mask[0, 0, 1, 2])}
    if not kinds:
        return Ahead.NOWHERE
    return Ahead.EVERYWHERE if "full_attention" in kinds else Ahead.IN_WINDOWS


def _is_seen(masked: torch.Tensor) -> bool:
    """Return whether a mask's element lets the query see the key: true, or 0 as a term of the score."""
    return bool(masked if masked.dtype == torch.bool else masked == 0)


def _compute_parts(
    sight: Sight, tokens: list[int], picture: Picture, layers: list[LayerShape], shapes: Shapes
) -> torch.Tensor:
    model = sight.model
    places = [index for index, token in enumerate(tokens) if token == sight.place_id]
    middle = places[0 if sight.sees_ahead else len(places) // 2]
    placed = PlacedPicture(PictureSpan(places[0], places[-1] + 1, picture.digest()), picture)
    sampling = RowSampling(SamplingParams(), 0, num_prompt_tokens=len(tokens))
    sight.admit(AdmittedRow.of(0, tokens, [0], sampling, encode_pictures([placed])))
    backend, states = TorchPaged(), States.allocate(shapes, 1, model.device) if shapes else None
    backend.allocate(layers, 1, len(tokens), model.dtype, model.device)
    found = []
    for begin, end in ((0, middle), (middle, len(tokens))):
        positions = torch.arange(begin, end, device=model.device)
        paged = PagedStep(
            backend,
            lay_in_block([0, end - begin], [end], positions),
            token_rows=torch.zeros_like(positions),
            states=states,
        )
        input_ids = torch.tensor([tokens[begin:end]], device=model.device)
        plan = StepPlan(0, [], [], [0], [begin], [end - begin], [1], 0)
        seen = sight.see(lay_out(plan), input_ids)
        paged.metadata.set_ends(seen.ends)
        found.append(model(input_ids=input_ids, use_cache=False, paged=paged, **seen.arguments()).logits[0])
    sight.forget()
    return torch.cat(found)
