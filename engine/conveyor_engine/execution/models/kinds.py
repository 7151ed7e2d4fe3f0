"""The kinds of models and the classes of transformers that load them. Runners pass a kind to `loader` and `checks`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    CLIPConfig,
    CLIPModel,
    PretrainedConfig,
    SiglipConfig,
    SiglipModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)

from conveyor_engine.model_files import has_vision, read_architectures, reads_masked_lm, scores_tokens


@dataclass(frozen=True, slots=True)
class ModelKind:
    """One of transformers' classes that load models, and the configurations that it loads."""

    task: str  # a task's name in `registry`; also the verb in errors
    name: str
    auto_class: Any
    classes: Mapping[Any, Any]  # model classes by the class of the configuration
    text_only: bool = False  # whether to reject models that have other parts besides their text model
    own_attention: bool = True  # whether transformers' modules call our attention; otherwise they keep their own
    encodes_and_decodes: bool = False  # whether it has an encoder and a decoder
    without_pooler: bool = False  # whether to drop the pooler, a layer over the first token; checkpoints may lack it
    second: "ModelKind | None" = None  # for configurations that are not in `classes`

    def of(self, config: PretrainedConfig) -> "ModelKind | None":
        """Return this kind or its second one, whichever has a class for the configuration; None if neither has."""
        if type(config) in self.classes and (not self.text_only or config is config.get_text_config()):
            return self
        return self.second and self.second.of(config)


# Models of images and texts that transformers has no text model for. They run without images, so without their towers.
_IMAGE_TEXT: Final = ModelKind(
    "generate", "model of images and texts", AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
)
CAUSAL_LM: Final = ModelKind(
    "generate", "causal language model", AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING, second=_IMAGE_TEXT
)
TEXT_ENCODER: Final = ModelKind("embed", "text encoder", AutoModel, MODEL_MAPPING, text_only=True, without_pooler=True)
MASKED_LM: Final = ModelKind(
    "embed", "masked language model", AutoModelForMaskedLM, MODEL_FOR_MASKED_LM_MAPPING, text_only=True
)
CROSS_ENCODER: Final = ModelKind(
    "rerank",
    "sequence classifier",
    AutoModelForSequenceClassification,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    text_only=True,
)
TOKEN_SCORER: Final = ModelKind(
    "rerank", "causal language model", AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING, text_only=True
)
SEQUENCE_CLASSIFIER: Final = replace(CROSS_ENCODER, task="classify")
TOKEN_CLASSIFIER: Final = ModelKind(
    "classify",
    "token classifier",
    AutoModelForTokenClassification,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    text_only=True,
)
IMAGE_CLASSIFIER: Final = ModelKind(
    "imageclassify",
    "image classifier",
    AutoModelForImageClassification,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    own_attention=False,
)
DUAL_ENCODER: Final = ModelKind(
    "embed",
    "encoder of images and texts (of the kinds clip and siglip)",
    AutoModel,
    {CLIPConfig: CLIPModel, SiglipConfig: SiglipModel},
    own_attention=False,
)
SPEECH: Final = ModelKind(
    "transcribe",
    "model of speech (of the kind whisper)",
    WhisperForConditionalGeneration,
    {WhisperConfig: WhisperForConditionalGeneration},
    own_attention=False,
    encodes_and_decodes=True,
)
_OF_TASKS: Final = {
    "generate": CAUSAL_LM, "embed": TEXT_ENCODER, "rerank": CROSS_ENCODER, "classify": SEQUENCE_CLASSIFIER,
    "imageclassify": IMAGE_CLASSIFIER, "transcribe": SPEECH,
}  # fmt: skip


def is_encoder(config: PretrainedConfig) -> bool:
    """Return whether the model's tokens attend to both sides."""
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)


def find_kind(task: str, directory: Path) -> ModelKind | None:
    """Return the kind of a task's model in `directory`; None if the task does not load it as one class of transformers.

    Raises ModelError.
    """
    if task == "embed" and has_vision(directory):
        return DUAL_ENCODER
    if task == "embed" and reads_masked_lm(directory):
        return MASKED_LM
    if task == "rerank" and scores_tokens(directory):
        return TOKEN_SCORER
    if task == "classify" and any(name.endswith("ForTokenClassification") for name in read_architectures(directory)):
        return TOKEN_CLASSIFIER
    return _OF_TASKS.get(task)
