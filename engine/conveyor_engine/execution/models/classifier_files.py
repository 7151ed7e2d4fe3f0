"""Reads the meaning of a classifier's logits from its directory. Called by the runner at start. No torch.

Transformers has the labels and the type of problem in config.json. The files of sentence-transformers say how a
cross-encoder's logits become scores. Settings that this engine does not support are rejected, because the scores would
differ.
"""

from pathlib import Path
from typing import Any, Final

from transformers import PretrainedConfig

from conveyor_engine.errors import ModelError
from conveyor_engine.model_files import SENTENCE_SETTINGS, read_object
from conveyor_engine.wire.classification import Activation, ClassifierFacts

LABELS_MAX: Final = 65_536
TOKEN_LABELS_MAX: Final = 1024  # each token has a logit for each label
_ACTIVATIONS: Final[dict[str, Activation]] = {"Sigmoid": "sigmoid", "Identity": "none"}  # by the name of torch's class


def describe_cross_encoder(directory: Path, config: PretrainedConfig) -> ClassifierFacts:
    """Read the label and the activation of a model that ranks.

    Raises ModelError for a model with several labels, or with an activation that this engine does not support.
    """
    labels = _read_labels(config, LABELS_MAX)
    if len(labels) != 1:
        raise ModelError(f"{directory} has a classifier of {len(labels)} labels; a model that ranks has one label")
    settings = read_object(directory / SENTENCE_SETTINGS)
    if settings.get("default_prompt_name") is not None:
        raise ModelError(f"{SENTENCE_SETTINGS} in {directory} puts a prompt before each text, which is not supported")
    return ClassifierFacts(
        labels=labels,
        activation=read_activation(settings, config),
        num_token_types=_count_token_types(directory, config),
    )


def describe_classifier(directory: Path, config: PretrainedConfig, *, classifies_tokens: bool) -> ClassifierFacts:
    """Read labels and activation as transformers' pipelines do. Raises ModelError for too many labels."""
    labels = _read_labels(config, TOKEN_LABELS_MAX if classifies_tokens else LABELS_MAX)
    activation: Activation = "softmax"
    if not classifies_tokens and config.problem_type == "regression":
        activation = "none"
    elif not classifies_tokens and (config.problem_type == "multi_label_classification" or len(labels) == 1):
        activation = "sigmoid"
    return ClassifierFacts(
        labels=labels,
        activation=activation,
        num_token_types=_count_token_types(directory, config),
        classifies_tokens=classifies_tokens,
    )


def _count_token_types(directory: Path, config: PretrainedConfig) -> int:
    """Return the number of token types; 1 if the model does not use them to distinguish the texts of a pair."""
    names = read_object(directory / "tokenizer_config.json").get("model_input_names")
    if isinstance(names, list) and "token_type_ids" not in names:
        return 1
    return max(1, getattr(config, "type_vocab_size", None) or 1)


def _read_labels(config: PretrainedConfig, most: int) -> tuple[str, ...]:
    number, named = config.num_labels, config.id2label
    if number > most:
        raise ModelError(f"{config.model_type} has {number} labels, more than the limit of {most}")
    return tuple(str(named.get(index, f"LABEL_{index}")) for index in range(number))


def read_activation(settings: dict[str, Any], config: PretrainedConfig) -> Activation:
    """Return the activation; sigmoid if no file names one. Raises ModelError for an unknown activation.

    sentence-transformers changed where it stores the activation in versions 1, 4 and 6. The newest place takes
    precedence.
    """
    of_config = getattr(config, "sentence_transformers", None)
    of_config = of_config.get("activation_fn") if isinstance(of_config, dict) else None
    oldest = getattr(config, "sbert_ce_default_activation_function", None)
    named = str(settings.get("activation_fn") or of_config or oldest or "Sigmoid")
    activation = _ACTIVATIONS.get(named.rpartition(".")[2])
    if activation is None:
        raise ModelError(f"its scores use the activation {named[:100]}; this engine has {' and '.join(_ACTIVATIONS)}")
    return activation
