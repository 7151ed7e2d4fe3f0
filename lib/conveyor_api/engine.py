"""`spec.runtime` and `spec.engine`: what runs the model, and how."""

import re
from typing import Annotated, Final, Literal

from pydantic import Field

from conveyor_api.base import ApiModel, Rule
from conveyor_api.quantities import Duration, between, parse_duration_seconds

Runtime = Literal["Conveyor", "VLLM"]
Task = Literal[
    "Generate", "Embed", "Rerank", "Classify", "ImageClassify", "Transcribe", "ImageGenerate", "Custom"
]  # fmt: skip
Device = Literal["CUDA", "Auto"]
Dtype = Literal["Auto", "Float32", "BFloat16", "Float16"]
ToolParser = Literal[
    "Auto", "None", "Hermes", "Qwen3Coder", "Llama3Json", "Llama4Pythonic", "Mistral", "DeepSeekV3", "DeepSeekV31",
    "DeepSeekV32", "DeepSeekV4", "DeepSeekV41", "GLM45", "MiniMaxM2", "SeedOSS", "Granite", "Jamba", "InternLM",
    "Phi4MiniJson", "LFM2", "Harmony", "KimiK2", "Gemma4", "FunctionGemma", "LongCat", "Olmo3", "Command",
]  # fmt: skip
ReasoningParser = Literal["Auto", "None", "Think", "Mistral", "SeedOSS", "Harmony", "Gemma4", "Command"]

DEFAULT_QUEUED_REQUESTS: Final = 256
# Flags of vLLM that are set from other fields. If a flag were given twice, its last value would silently win.
VLLM_FLAGS: Final = (
    "--config", "--model", "--served-model-name", "--host", "--port", "--dtype", "--max-model-len", "--max-num-seqs",
    "--max-num-batched-tokens", "--gpu-memory-utilization", "--num-gpu-blocks-override", "--block-size",
    "--generation-config", "--ssl-certfile", "--ssl-keyfile", "--enable-ssl-refresh", "--ssl-ca-certs",
)  # fmt: skip
_NAMES_A_FLAG: Final = f"argument.split('=')[0].replace('_', '-') in {list(VLLM_FLAGS)}"
_CLASS_PATTERN: Final = r"^[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$"
_HOST_PATTERN: Final = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?$"
_IMAGE_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$"


class Engine(ApiModel):
    """Settings of the engine."""

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
    """Engine image; default: the engine image set in the chart. A running service keeps its image until its pods are
    replaced for another reason. Runtime VLLM requires a vLLM image."""
    device: Device = "CUDA"
    """CUDA: requires a GPU. Auto: a GPU if there is one, otherwise the CPU. A GPU that cannot be used is an error in
    both cases."""
    dtype: Dtype = "Auto"
    """Number format of weights, activations and KV cache. Auto on a GPU: BFloat16, or Float16 for a model saved in it.
    Auto on a CPU: BFloat16 if the CPU computes in it, otherwise Float32."""
    max_model_len: Annotated[int, Field(ge=2, le=16_777_216)] | None = None
    """Longest request, prompt and output together, in tokens; default: the model's own limit."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=1024)] | None = None
    """GPUs, or processes on a CPU, that compute one model together; must divide the model's heads. Default: all GPUs of
    `resources.limits` if the model may generate text, otherwise 1."""
    max_queued_requests: Annotated[int, Field(ge=1, le=100_000)] = DEFAULT_QUEUED_REQUESTS
    """Limit of requests that wait inside one engine. Each text or image to embed, rank or classify, and each image to
    generate, counts as one. Requests beyond it get 429."""
    startup_timeout: Annotated[Duration, between("1m", "24h")] = "30m"
    """Time for an engine to load its model and to warm up, once the model is downloaded. A container that needs longer
    is restarted."""
    sampling_defaults: Literal["Model", "OpenAI"] = "Model"
    """Sampling parameters of requests that do not set them. Model: those of the model's generation_config.json. OpenAI:
    temperature 1, without top_p and top_k."""
    tool_parser: ToolParser = "Auto"
    """The format in which the model calls tools. Auto: by its chat template. None: requests with tools must set
    tool_choice to `required` or to a named tool."""
    reasoning_parser: ReasoningParser = "Auto"
    """The marks of the model's thinking, which becomes `reasoning` in answers. Auto: by its chat template. None:
    thinking is content."""
    media_hosts: Annotated[
        list[Annotated[str, Field(max_length=259)]],
        Field(max_length=32),
        Rule(
            f"self.all(host, host.matches('{_HOST_PATTERN}'))",
            "must be NAME or NAME:PORT",
            lambda hosts: all(re.fullmatch(_HOST_PATTERN, host) for host in hosts),
        ),
    ] = Field(default_factory=list)
    """Hosts, as NAME or NAME:PORT, of images in chats that are fetched by https."""
    model_class: (
        Annotated[
            str,
            Field(min_length=3, max_length=253),
            Rule(
                f"self.matches('{_CLASS_PATTERN}')",
                "must be a class of the engine's image as package.module:Class",
                lambda name: re.fullmatch(_CLASS_PATTERN, name) is not None,
            ),
        ]
        | None
    ) = None
    """The Python class that is the model, as package.module:Class, for task Custom. `engine.image` must contain it.
    Default: the exported program `model.pt2` among the model's files."""
    args: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1024)]],
        Field(max_length=64),
        Rule(
            f"!self.exists(argument, {_NAMES_A_FLAG})",
            "must not have flags that Conveyor sets itself: " + ", ".join(VLLM_FLAGS),
            lambda arguments: not any(_flag_of(argument) in VLLM_FLAGS for argument in arguments),
        ),
    ] = Field(default_factory=list)
    """Further arguments of `vllm serve`, one list element for each; only for runtime VLLM."""

    @property
    def startup_timeout_seconds(self) -> float:
        return parse_duration_seconds(self.startup_timeout)


def _flag_of(argument: str) -> str:
    """Return the flag's name as vLLM reads it: with dashes in place of underscores."""
    return argument.partition("=")[0].replace("_", "-")
