"""Makes rotary embeddings independent of the batch. `tasks.generate` calls it once, after the model is loaded.

In transformers, the frequencies of the types `dynamic` and `longrope` depend on the longest text of a batch, so they
would change while other texts have keys in the cache. Like vLLM, the engine uses the frequencies for a text of
`max_model_len` tokens throughout.
"""

import torch
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from conveyor_engine.execution.models.checks import CHANGING


def fix_frequencies(model: PreTrainedModel, max_model_len: int) -> None:
    """Give every rotary embedding of a changing type the frequencies for `max_model_len` tokens, and no others.

    Embeddings with a type for each type of layers (Gemma 3) stay as they are: `checks` rejects changing types in them.
    """
    for module in model.modules():
        kind, inv_freq = getattr(module, "rope_type", None), getattr(module, "inv_freq", None)
        if isinstance(kind, str) and kind in CHANGING and isinstance(inv_freq, torch.Tensor):
            fixed, module.attention_scaling = ROPE_INIT_FUNCTIONS[kind](
                module.config, inv_freq.device, seq_len=max_model_len
            )
            module.register_buffer("inv_freq", fixed, persistent=False)
            module.rope_type = "default"  # transformers then never changes them
