"""Runs plans of a model that embeds images and texts in one vector space (CLIP, SigLIP), with one encoder for each.

It implements the protocol `loop.executor` for one device. It keeps no state between steps. Both encoders are those of
transformers. All images of a step are computed in one forward, and all texts in another.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import SiglipConfig

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ConfigError, ModelError
from conveyor_engine.execution.largest_step import measure_step
from conveyor_engine.execution.limits import choose_max_model_len
from conveyor_engine.execution.models import checks
from conveyor_engine.execution.models.kinds import DUAL_ENCODER
from conveyor_engine.execution.placement import Placement
from conveyor_engine.execution.runners.base import Runner
from conveyor_engine.execution.start import Progress, RunnerStart
from conveyor_engine.execution.transfer import HostCopy, stack_pictures, to_device
from conveyor_engine.images.processor import load_processor
from conveyor_engine.model_files import SENTENCE_MODULES, read_object
from conveyor_engine.tasks.embed.execution.pooling import finish
from conveyor_engine.tasks.embed.facts import EmbeddingFacts, PictureFacts, PoolingParams
from conveyor_engine.wire.step import StepPlan, StepResult

_TOKENS_MAX: Final = 2**13  # maximum for one image


class DualRunner(Runner):
    """One model on one device, ready to run after construction."""

    def __init__(self, config: EngineConfig, placement: Placement, progress: Progress) -> None:
        """Load the model. Raises ConfigError or ModelError."""
        _check_settings(config)
        start = RunnerStart(config, placement, progress, DUAL_ENCODER)
        self.device, self._dtype = start.device, start.dtype
        directory, of_text = Path(config.model), start.model_config.text_config
        if (directory / SENTENCE_MODULES).is_file():
            raise ModelError(f"{directory} has {SENTENCE_MODULES}, whose steps this engine lacks for such a model")
        longest: int = of_text.max_position_embeddings
        self._padded_tokens, self._pad_token = 0, 0
        if isinstance(start.model_config, SiglipConfig):  # SigLIP was trained with padded texts and without a mask
            self._padded_tokens, self._pad_token = longest, _find_pad_token(directory, of_text)
        self._shape = load_processor(directory).find_only_shape()
        self.model: Any = start.load()
        pictures, size = self._try()
        progress(f"event=model_loaded image={'x'.join(map(str, self._shape))} image_tokens={pictures.num_tokens}")
        facts = EmbeddingFacts(size=size, pictures=pictures, padded_tokens=self._padded_tokens)
        self.facts = start.facts(
            self.model,
            max_model_len=choose_max_model_len(config, longest),
            attention_backend="model",
            vocab_size=of_text.vocab_size,
            of_task=facts.encode(),
        )
        if self.device.type == "cuda":
            self._measure(pictures, progress)

    def _try(self) -> tuple[PictureFacts, int]:
        """Run the model once. Returns facts about its images, and the number of dimensions of its vectors.

        Raises ModelError if the model does not accept the output of its image processor, or if its vectors of images
        and of texts differ in size.
        """
        pixels = torch.zeros((1, *self._shape), dtype=self._dtype, device=self.device)
        made = " x ".join(map(str, self._shape))

        def run() -> tuple[Any, tuple[int, int]]:
            encoded = self.model.get_image_features(pixel_values=pixels)
            return encoded, (encoded.pooler_output.shape[-1], self._embed_texts([[0]]).shape[-1])

        encoded, sizes = checks.run_once(f"the model does not take the {made} that its image processor makes", run)
        if sizes[0] != sizes[1]:
            raise ModelError(f"its images have {sizes[0]} dimensions and its texts {sizes[1]}: they must be equal")
        num_tokens = encoded.last_hidden_state.shape[1]
        if num_tokens > _TOKENS_MAX:
            raise ModelError(f"its images become {num_tokens} tokens, and at most {_TOKENS_MAX} are supported")
        return PictureFacts(self._shape, num_tokens), sizes[0]

    def _measure(self, pictures: PictureFacts, progress: Progress) -> None:
        """Run the largest step. Raises ModelError if it does not fit into memory beside the weights."""
        facts = self.facts
        number = max(1, min(facts.max_num_seqs, facts.max_num_batched_tokens // pictures.num_tokens))
        pixels = torch.zeros((number, *self._shape), dtype=self._dtype, device=self.device)
        texts = [[0] * facts.max_model_len] * max(
            1, min(facts.max_num_seqs, facts.max_num_batched_tokens // facts.max_model_len)
        )

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            return self._embed_pictures(pixels), self._embed_texts(texts)

        what = f"{number} images and {len(texts)} texts"
        step_bytes = measure_step(self.device, what, "`max_num_seqs` or `max_num_batched_tokens`", run)
        progress(f"event=largest_step_fits mib={step_bytes / 2**20:.0f}")

    def begin(self, plan: StepPlan) -> Callable[[object], Callable[[], StepResult]]:
        """Begin a step, which computes the image or the text that the plan has for each row. No row samples.

        On a GPU this only launches the work. Call the returned function, and then the function that it returns: the
        second call waits for the results.
        """
        brought = {row.row: row for row in plan.admitted}
        prompts = [brought[row] for row in plan.rows]
        params = [PoolingParams.read(prompt.payload) for prompt in prompts]
        pictures = [index for index, each in enumerate(params) if each.pixels]
        texts = [index for index, each in enumerate(params) if not each.pixels]
        with torch.inference_mode():
            computed = []
            if pictures:
                pixels = [params[index].pixels for index in pictures]
                computed.append(self._embed_pictures(stack_pictures(pixels, self._shape, self.device, self._dtype)))
            if texts:
                computed.append(self._embed_texts([prompts[index].token_ids for index in texts]))
            copy = HostCopy(*computed)

        def read() -> StepResult:
            payloads = [b""] * len(prompts)
            vectors = (vector for part in copy.wait() for vector in part.numpy())
            for index, vector in zip(pictures + texts, vectors, strict=True):
                how = params[index]
                payloads[index] = finish(vector, how, normalizes=True)
            return StepResult(plan.number, [], payloads=payloads)

        return lambda _: read

    def _embed_pictures(self, pixels: torch.Tensor) -> torch.Tensor:
        """Compute one vector for each image, float32 (images, size), from pixels (images, channels, height, width)."""
        vectors: torch.Tensor = self.model.get_image_features(pixel_values=pixels).pooler_output
        return vectors.float()

    def _embed_texts(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Compute one vector for each text, float32 (texts, size).

        There is no mask. SigLIP attends to its padding. CLIP's attention is causal, so no token sees later ones. CLIP
        takes the vector of the first end-of-text token, so texts for CLIP are padded with copies of their last token.
        """
        longest = self._padded_tokens or max(map(len, texts))
        ids = np.full((len(texts), longest), self._pad_token, dtype=np.int64)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = text
            if not self._padded_tokens:
                row[len(text) :] = text[-1]
        vectors: torch.Tensor = self.model.get_text_features(input_ids=to_device(ids, self.device)).pooler_output
        return vectors.float()


def _find_pad_token(directory: Path, of_text: Any) -> int:
    """Return the padding token that the tokenizer's files name, otherwise that of config.json.

    Raises ModelError if neither names one.
    """
    named = read_object(directory / "tokenizer_config.json").get("pad_token")
    text = named.get("content") if isinstance(named, dict) else named
    found = Tokenizer.from_file(str(directory / "tokenizer.json")).token_to_id(text) if isinstance(text, str) else None
    token = of_text.pad_token_id if found is None else found
    if not isinstance(token, int) or not 0 <= token < of_text.vocab_size:
        raise ModelError(f"{directory} names no token for padding (pad_token in tokenizer_config.json)")
    return token


def _check_settings(config: EngineConfig) -> None:
    """Reject settings that do not apply to this kind of model. Raises ConfigError."""
    if config.attention_backend != "auto":
        raise ConfigError(
            f"`attention_backend: {config.attention_backend}` is set, but this model has its own attention; "
            "leave it out"
        )
