"""Decides how a checkpoint is loaded: as it is, restored from a known quantized format, or not at all.

transformers converts any stored number to the model's type, and leaves out tensors that the model's class lacks. So a
weight that means nothing without its scale is loaded without an error, and every answer is wrong. A checkpoint is
rejected if its format is unknown, if a weight is neither restored nor stored as a floating-point number of 16 bits or
more, or if a tensor was left out that a module of the model needs. Called by `loader` and the pipelines of pictures.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import nn
from transformers import PretrainedConfig

from conveyor_engine.errors import ModelError
from conveyor_engine.execution.models.quantized.gguf_weights import plan_gguf
from conveyor_engine.execution.models.quantized.reading import Restoring, plan_layouts
from conveyor_engine.execution.models.quantized.stored import StoredTensor, read_stored
from conveyor_engine.quantization import build_refusal, check_declared, or_vllm, read_declared

GGUF: Final = "gguf"  # the method that `conveyor_engine.gguf.config` declares
FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})  # names of number types in safetensors
_NARROW = re.compile("F[48].*|F6.*")
# The last part of the names that quantizers give to weights, and to what weights are computed from.
_QUANTIZED = re.compile(
    r"q?weight|weight_(?:packed|shape|format)|qzeros|g_idx|SCB|absmax|quant_map|nested_(?:absmax|quant_map)"
    r"|(?:\w+_)?(?:zero_point|blocks|zeros)|(?:(?:weight|input|output|activation|act|[qkv]|\w+_proj)_)?scales?(?:_inv|_2)?"
    r"|codebooks|codes|trellis|bitsandbytes__\w+"
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory with config.json and weights."""

    directory: Path
    weights: str | None = None  # the file with the weights, if config.json names one
    vllm_serves: bool = False  # whether `runtime: VLLM` has the task
    restores: bool = False  # whether the caller loads `Restoring.tensors` in place of the stored ones

    def check_stored(self) -> None:
        """Reject a checkpoint by its files or by the headers of its weights. Raises ModelError."""
        if (declared := read_declared(self.directory)) is not None:
            if not self.restores:
                raise self._refuse(declared.where, "the pipeline needs unquantized weights")
            check_declared(self.directory, declared, vllm_serves=self.vllm_serves)
            return
        for tensor in read_stored(self.directory, self.weights):
            last = tensor.name.rpartition(".")[2]
            if _NARROW.fullmatch(tensor.kind) or (tensor.kind not in FLOATS and _QUANTIZED.fullmatch(last)):
                raise self._refuse(f"{tensor.name} is stored as {tensor.kind}, and no file declares a format")

    def restore(self, config: PretrainedConfig, *, defers: bool = False) -> Restoring | None:
        """Return the restored weights of a checkpoint that declares quantization; None for another.

        defers: whether weights are read when they are packed.
        """
        declared = read_declared(self.directory)
        if declared is None:
            return None
        if declared.method == GGUF:
            return Restoring(plan_gguf(self.directory, config), self.directory, defers=defers)
        stored = {each.name: each for each in read_stored(self.directory, self.weights)}
        return Restoring(plan_layouts(stored, declared), self.directory, defers=defers)

    def check_loaded(
        self, model: nn.Module, loading_info: Mapping[str, Any], restoring: Restoring | None = None
    ) -> None:
        """Reject a checkpoint if a weight was converted from whole numbers, or if a module's tensor was left out.

        loading_info: from transformers or diffusers. Tensors of modules that this model lacks, such as another head,
        may be left out. Raises ModelError.
        """
        if restoring is not None and restoring.failure:
            raise restoring.build_error()
        floats = {name for name, parameter in model.named_parameters() if parameter.is_floating_point()}
        tensors = restoring.tensors.values() if restoring else read_stored(self.directory, self.weights)
        for tensor in tensors:
            if not isinstance(tensor, StoredTensor) or tensor.kind in FLOATS:
                continue
            if not floats.isdisjoint(_name_alike(tensor.name, model)):
                raise self._refuse(f"{tensor.name} is stored as {tensor.kind}")
        modules = {name for name, _ in model.named_modules()}
        declared = read_declared(self.directory)
        for key in sorted(map(str, loading_info.get("unexpected_keys") or ())):
            module, _, last = key.rpartition(".")
            if declared is not None and declared.method == GGUF:  # such a file has the tensors of one model alone
                raise self._refuse(f"{type(model).__name__} has no {key}")
            if last not in ("weight", "bias"):
                if _QUANTIZED.fullmatch(last) or (restoring and not modules.isdisjoint(_name_alike(module, model))):
                    raise self._refuse(f"the model's class has no {key}")
            elif module and not modules.isdisjoint(_name_alike(module, model)):
                raise ModelError(
                    f"the checkpoint in {self.directory} has {key}, which {type(model).__name__} leaves out, so its "
                    "answers would be wrong: use weights that fit config.json" + or_vllm(self.vllm_serves)
                )

    def _refuse(self, found: str, problem: str = "") -> ModelError:
        return build_refusal(self.directory, found, problem, vllm_serves=self.vllm_serves)


def _name_alike(name: str, model: nn.Module) -> set[str]:
    """Return the names that a tensor or module of the checkpoint may have in the model, with another head or none."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    return {name, name.removeprefix(prefix), prefix + name}
