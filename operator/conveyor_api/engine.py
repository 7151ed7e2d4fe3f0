"""`spec.engine`: how the model is run."""

import re
from typing import Annotated, Final, Literal

from pydantic import Field

from conveyor_api.base import ApiModel, Rule

Device = Literal["CUDA", "Auto"]
Dtype = Literal["Auto", "Float32", "BFloat16", "Float16"]

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
    """Engine image; default: the one that the operator was installed with."""
    device: Device = "CUDA"
    """CUDA: a GPU, or the service fails and says so. Auto: a GPU if there is one, else the CPU."""
    dtype: Dtype = "Auto"
    """Number format of weights, activations and KV cache. Auto on a GPU: BFloat16, or Float16 for a model saved in it
    and on GPUs without BFloat16. Auto on a CPU: BFloat16 if it computes in it, else Float32."""
    max_model_len: Annotated[int, Field(ge=2, le=16_777_216)] | None = None
    """Longest request, prompt and output together, in tokens; default: the model's own limit."""
    max_queued_requests: Annotated[int, Field(ge=1, le=100_000)] = 256
    """Requests that may wait inside one engine, each text to embed one; one more gets 429. The gateways keep this queue
    short."""
    sampling_defaults: Literal["Model", "OpenAI"] = "Model"
    """How a request is sampled that does not say it. Model: temperature, top_p and top_k of the model's
    generation_config.json. OpenAI: temperature 1 and no cut."""
