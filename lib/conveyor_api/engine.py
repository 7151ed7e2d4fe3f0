"""`spec.runtime` and `spec.engine`: what runs the model, and how."""

import re
from typing import Annotated, Final, Literal

from pydantic import Field

from conveyor_api.base import ApiModel, Rule

Runtime = Literal["Conveyor", "VLLM"]
Task = Literal["Generate", "Embed", "Rerank", "Classify"]
Device = Literal["CUDA", "Auto"]
Dtype = Literal["Auto", "Float32", "BFloat16", "Float16"]

TASKS_OF_ONE_STEP: Final[tuple[Task, ...]] = ("Embed", "Rerank", "Classify")
DEFAULT_QUEUED_REQUESTS: Final = 256
# Flags of vLLM that are made from other fields: given twice, the last one would win without a word.
VLLM_FLAGS: Final = (
    "--config", "--model", "--served-model-name", "--host", "--port", "--dtype", "--max-model-len", "--max-num-seqs",
    "--max-num-batched-tokens", "--gpu-memory-utilization", "--num-gpu-blocks-override", "--block-size",
    "--generation-config",
)  # fmt: skip
_NAMES_A_FLAG: Final = f"argument.split('=')[0].replace('_', '-') in {list(VLLM_FLAGS)}"
_IMAGE_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$"


class Engine(ApiModel):
    """How the model is run."""

    image: (
        Annotated[
            str,
            Field(min_length=1, max_length=512),
            Rule(
                f"self.matches('{_IMAGE_PATTERN}')",
                "must be an image reference such as registry.example/conveyor/engine:1.0, without spaces",
                lambda image: re.fullmatch(_IMAGE_PATTERN, image) is not None,
            ),
        ]
        | None
    ) = None
    """Engine image; default: the one that the operator was installed with. Runtime VLLM needs an image of vLLM here."""
    device: Device = "CUDA"
    """CUDA: a GPU, or the service fails and says so. Auto: a GPU if there is one, else the CPU. A GPU that cannot be
    used is an error with both."""
    dtype: Dtype = "Auto"
    """Number format of weights, activations and KV cache. Auto on a GPU: BFloat16, or Float16 for a model saved in
    it. Auto on a CPU: BFloat16 if it computes in it, else Float32."""
    max_model_len: Annotated[int, Field(ge=2, le=16_777_216)] | None = None
    """Longest request, prompt and output together, in tokens; default: the model's own limit."""
    max_queued_requests: Annotated[int, Field(ge=1, le=100_000)] = DEFAULT_QUEUED_REQUESTS
    """Requests that may wait inside one engine, each text to embed, rank or classify one; one more gets 429. The
    gateways keep this queue short."""
    sampling_defaults: Literal["Model", "OpenAI"] = "Model"
    """How a request is sampled that does not say it. Model: temperature, top_p and top_k of the model's
    generation_config.json. OpenAI: temperature 1 and no cut."""
    args: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1024)]],
        Field(max_length=64),
        Rule(
            f"!self.exists(argument, {_NAMES_A_FLAG})",
            f"these come from other fields of the service, or are Conveyor's own: {', '.join(VLLM_FLAGS)}",
            lambda arguments: not any(_flag_of(argument) in VLLM_FLAGS for argument in arguments),
        ),
    ] = Field(default_factory=list)
    """More arguments of `vllm serve`, as one list element each; for runtime VLLM alone."""


def _flag_of(argument: str) -> str:
    """As vLLM reads it: underscores count as dashes."""
    return argument.partition("=")[0].replace("_", "-")
