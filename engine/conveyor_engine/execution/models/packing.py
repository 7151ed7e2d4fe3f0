"""Checks that packing sequences does not change a model's results, and finds the position of a sequence's first token.

`runners.packed` calls it once, after loading and before `fuse`. `loader` calls it for text models within models of
images and texts. Model families derive different things from a batch:
masks, relative positions, and the first position (RoBERTa's is the id of the padding token plus one).
"""

from random import Random

import torch
from transformers import PreTrainedModel

from conveyor_engine.errors import ModelError
from conveyor_engine.execution.attention import interface
from conveyor_engine.execution.attention.packed import Packed
from conveyor_engine.execution.models import checks
from conveyor_engine.execution.models.quantized.deferred import stand_ins

_LENGTHS = (3, 6)
# Largest relative error of a token's hidden state. Positions that are wrong by one give 0.5 or more. Eager attention in
# bfloat16 gives up to 0.07 over 28 layers.
_TOLERANCE_FLOAT32, _TOLERANCE_HALF = 1e-3, 0.1


@stand_ins()
def find_first_position(model: PreTrainedModel) -> int:
    """Return the position of a sequence's first token. Raises ModelError if packing changes the model's results."""
    padding = getattr(model.config, "pad_token_id", None)
    random = Random(0)
    token_ids = [token_id for token_id in range(model.get_input_embeddings().num_embeddings) if token_id != padding]
    prompts = [torch.tensor(random.choices(token_ids, k=length), device=model.device) for length in _LENGTHS]
    try:
        with torch.inference_mode():
            alone = torch.cat([_compute_alone(model, prompt) for prompt in prompts])
            for first in (0, *([padding + 1] if isinstance(padding, int) and padding >= 0 else [])):
                if _is_same(alone, _compute_packed(model, prompts, first)):
                    return first
    except checks.TRANSFORMERS_ERRORS as error:
        checks.raise_if_of_device(error)
        raise ModelError(f"{type(model).__name__} cannot be run packed: {checks.on_one_line(error)}") from error
    raise ModelError(
        f"{type(model).__name__} gives other results for sequences that are packed one after another: this engine "
        "cannot run it"
    )


def _is_same(alone: torch.Tensor, packed: torch.Tensor) -> bool:
    distance = (alone.float() - packed.float()).norm(dim=-1) / alone.float().norm(dim=-1)
    return bool((distance < (_TOLERANCE_FLOAT32 if alone.dtype == torch.float32 else _TOLERANCE_HALF)).all())


def _compute_alone(model: PreTrainedModel, prompt: torch.Tensor) -> torch.Tensor:
    """Compute hidden states with transformers' own attention: (n,) -> (n, hidden)."""
    interface.use_transformers_attention(model)
    hidden: torch.Tensor = model(input_ids=prompt[None], use_cache=False).last_hidden_state[0]
    model.set_attn_implementation(interface.IMPLEMENTATION)
    return hidden


def _compute_packed(model: PreTrainedModel, prompts: list[torch.Tensor], first: int) -> torch.Tensor:
    positions = torch.cat([torch.arange(first, first + len(prompt), device=model.device) for prompt in prompts])
    starts = [0, len(prompts[0]), len(prompts[0]) + len(prompts[1])]
    hidden: torch.Tensor = model(
        input_ids=torch.cat(prompts)[None], position_ids=positions[None], use_cache=False, paged=Packed(starts)
    ).last_hidden_state[0]
    return hidden
