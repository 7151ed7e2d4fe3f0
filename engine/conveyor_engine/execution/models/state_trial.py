"""Checks that a model with states for its rows gives the logits of transformers' own code, in parts as in one piece.

`tasks.generate` calls it once, before `fuse`. A short text is computed in two chunks and a decode, with keys, values
and states carried from one to the next, and compared with one forward of transformers without a cache.
"""

from random import Random

import torch
from transformers import PreTrainedModel

from conveyor_engine.errors import ModelError
from conveyor_engine.execution.attention import interface
from conveyor_engine.execution.attention.backend import LayerShape
from conveyor_engine.execution.attention.interface import PagedStep
from conveyor_engine.execution.attention.torch_paged import TorchPaged
from conveyor_engine.execution.models import checks
from conveyor_engine.execution.models.last_layer import lay_in_block
from conveyor_engine.execution.models.quantized.deferred import stand_ins
from conveyor_engine.execution.states import Shapes, States

_PARTS = (5, 3, 1)  # tokens
# Largest relative error of the logits. A state that is not carried gives 0.3 or more, eleven families 2e-6 at most.
# transformers bounds Mamba-2's time steps from below in its form for several tokens, and not in that for one token. In
# Nemotron-H, where this bound is not 0, both forms differ by 2e-3. In half precision, the choice of experts may differ.
_TOLERANCE_FLOAT32, _TOLERANCE_ONE_TOKEN, _TOLERANCE_HALF = 1e-4, 1e-2, 0.15


@stand_ins()
def check_states(model: PreTrainedModel, layers: list[LayerShape], shapes: Shapes) -> None:
    """Raise ModelError if the states that are carried between steps change the model's results."""
    random, vocab_size = Random(0), model.get_input_embeddings().num_embeddings
    tokens = torch.tensor([random.randrange(vocab_size) for _ in range(sum(_PARTS))], device=model.device)
    problem = f"{type(model).__name__} cannot be run in parts"
    expected, found = checks.run_once(
        problem, lambda: (_compute_whole(model, tokens), _compute_parts(model, tokens, layers, shapes))
    )
    if not _is_same(expected.float(), found.float(), model.dtype):
        raise ModelError(
            f"{type(model).__name__} gives other results when a text is computed in parts: this engine cannot run it; "
            "serve it with `runtime: VLLM`"
        )


def _is_same(expected: torch.Tensor, found: torch.Tensor, dtype: torch.dtype) -> bool:
    several, one = (_TOLERANCE_FLOAT32, _TOLERANCE_ONE_TOKEN) if dtype == torch.float32 else (_TOLERANCE_HALF,) * 2
    parts = ((slice(0, -1), several), (slice(-1, None), one))
    return all(
        float((expected[part] - found[part]).norm() / expected[part].norm()) < tolerance for part, tolerance in parts
    )


def _compute_whole(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    interface.use_transformers_attention(model)
    logits: torch.Tensor = model(input_ids=tokens[None], use_cache=False).logits[0]
    model.set_attn_implementation(interface.IMPLEMENTATION)
    return logits


def _compute_parts(
    model: PreTrainedModel, tokens: torch.Tensor, layers: list[LayerShape], shapes: Shapes
) -> torch.Tensor:
    backend, states = TorchPaged(), States.allocate(shapes, 1, tokens.device)
    backend.allocate(layers, 1, len(tokens), model.dtype, tokens.device)
    found, done = [], 0
    for count in _PARTS:
        positions = torch.arange(done, done + count, device=tokens.device)
        done += count
        paged = PagedStep(
            backend,
            lay_in_block([0, count], [done], positions),
            token_rows=torch.zeros_like(positions),
            states=states,
        )
        found.append(
            model(input_ids=tokens[positions][None], position_ids=positions[None], use_cache=False, paged=paged).logits[
                0
            ]
        )
    return torch.cat(found)
