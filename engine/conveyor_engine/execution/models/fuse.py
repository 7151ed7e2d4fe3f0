"""Replaces modules of a loaded transformers model with our own faster modules that compute the same.

`start` calls it once after loading, on CPUs and GPUs. A decoder layer that `recognise` recognises is replaced as a
whole. In other layers, recognised attentions, MLPs, norms and linear layers are replaced one by one. All other modules
keep transformers' code.
"""

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from conveyor_engine.execution.models import checks
from conveyor_engine.execution.models.experts import Experts, experts_of
from conveyor_engine.execution.models.native_layers import NativeDecoderLayer
from conveyor_engine.execution.models.packed_linear import NativeLinear
from conveyor_engine.execution.models.quantized.deferred import stand_ins
from conveyor_engine.execution.models.recognise import attention_of, is_hooked, layer_of, linear_of, mlp_of, norm_of
from conveyor_engine.execution.models.state_mixers import mixer_of
from conveyor_engine.execution.models.trial import Calls, observe_calls

After = Callable[[nn.Module], None] | None
Kinds = tuple[tuple[str, Callable[[nn.Module, Calls], nn.Module | None]], ...]
_KINDS: Kinds = (  # the largest first
    ("layers", layer_of),
    ("attentions", attention_of),
    ("mixers", lambda part, _: mixer_of(part)),
    ("experts", lambda part, _: experts_of(part)),
    ("mlps", lambda part, _: mlp_of(part)),
    ("norms", lambda part, _: norm_of(part)),
    ("linears", lambda part, _: linear_of(part)),
)


def fuse_model(model: PreTrainedModel, *, whole_layers: bool = True, after: After = None) -> dict[str, int]:
    """Replace all modules that are recognised. Return how many of each kind were replaced, for the log.

    Without `whole_layers`, only parts of decoder layers are replaced. after: called with each of our modules when it is
    in its place. Each original is freed before the next module is replaced, so fusing needs memory for only one more
    layer. Raises the device's errors, for example if that memory is missing. The model is then partly replaced and must
    not be used.
    """
    done: Counter[str] = Counter()
    with torch.inference_mode():
        calls = observe_calls(model)
        with stand_ins(keep=True):
            _fuse_parts(model, calls, _KINDS if whole_layers else _KINDS[1:], done, after)
    return dict(done)


def _fuse_parts(parent: nn.Module, calls: Calls, kinds: Kinds, done: Counter[str], after: After) -> None:
    for name in [name for name, _ in parent.named_children()]:  # a list of the modules would keep the originals alive
        part = parent.get_submodule(name)
        kind, ours = _replacement(part, calls, kinds)
        if ours is None:
            _fuse_parts(part, calls, kinds, done, after)
        else:
            setattr(parent, name, ours)
            del part
            _read_stored(ours)
            if after is not None:
                after(ours)
            done[kind] += 1


def _read_stored(ours: nn.Module) -> None:
    """Pack the weights that are still in the checkpoint's files."""
    packed = [part.read_stored() for part in ours.modules() if isinstance(part, NativeLinear | Experts)]
    if any(packed):
        for part in ours.modules():
            if isinstance(part, NativeDecoderLayer):
                part.take_weights()


def _replacement(part: nn.Module, calls: Calls, kinds: Kinds) -> tuple[str, nn.Module | None]:
    """Return (kind, our module for the part), or ("", None) if the part is not recognised. Larger kinds come first."""
    for kind, recognise in kinds if not is_hooked(part) else ():
        try:
            ours = recognise(part, calls)
        except checks.TRANSFORMERS_ERRORS as error:  # parts with known names, but with other shapes or arguments
            checks.raise_if_of_device(error)
            continue
        if ours is not None:
            return kind, ours
    return "", None
