"""Makes an engine request for each input of a body that requests labels. Runs in worker processes."""

from array import array
from collections.abc import Mapping
from typing import Final

from conveyor_engine.errors import ErrorCode, InvalidRequest
from conveyor_engine.serving.preparing.inputs import read_inputs
from conveyor_engine.serving.preparing.jobs import BodyKind, ServedModel, check_num_inputs, name_input, parse_body
from conveyor_engine.serving.preparing.pairs import encode_pairs
from conveyor_engine.serving.preparing.prompts import (
    PreparedPrompts,
    Prompt,
    check_answer_size,
    check_input,
    read_input,
)
from conveyor_engine.serving.preparing.tokens import TOKEN_KINDS
from conveyor_engine.tasks.classify.bodies import ClassificationRequest, PredictRequest
from conveyor_engine.text.tokenizer import Truncation
from conveyor_engine.wire.classification import Activation, ClassifierFacts
from conveyor_engine.wire.worker import Job

NOWHERE: Final = (2**32 - 1, 2**32 - 1)


class PreparedTexts(PreparedPrompts, frozen=True, kw_only=True, array_like=True):
    """A valid request, with a prompt for each input, in order."""

    activation: Activation  # the function that turns logits into scores
    is_batch: bool = True  # False: there is one input, and the response is a flat list of its scores


def prepare_classification(model: ServedModel, job: Job) -> PreparedTexts:
    """Prepare a body of /classify for a model that classifies texts. Raises InvalidRequest or UnknownModel."""
    fields = parse_body(model, ClassificationRequest, job.body)
    facts = _check_inputs(fields.num_inputs(), job, fields.inputs_field)
    prompts = [Prompt(tokens) for tokens in read_inputs(model, job, fields)]
    activation = "none" if fields.use_activation is False else facts.activation
    return PreparedTexts.of("classify", prompts, job, fields, fields.inputs_field, activation=activation)


class PreparedWords(PreparedTexts, frozen=True, kw_only=True, array_like=True):
    """A valid request for a model that classifies each token."""

    texts: list[str]
    tokens: list[bytes]  # for each text, three uint32 per token: id, begin, end (NOWHERE for a special token)

    @property
    def num_bytes(self) -> int:
        """Roughly the memory that the texts and tokens take until the response is written."""
        return sum(map(len, (*self.texts, *self.tokens)))


def prepare_words(model: ServedModel, job: Job) -> PreparedWords:
    """Prepare a body of /classify for a model that classifies tokens. Raises InvalidRequest or UnknownModel."""
    fields = parse_body(model, ClassificationRequest, job.body)
    _check_words(fields)
    facts = _check_inputs(len(fields.input), job, "input")
    truncation = fields.truncation(job.facts.max_model_len)
    if truncation is not None and truncation.side == "left":
        message = "is left, and this model labels tokens: only the end of a text can be cut"
        raise InvalidRequest(f"truncation_side {message}", param="truncation_side")
    prompts, tokens = [], []
    for index, text in enumerate(fields.input):
        param = name_input("input", index, len(fields.input))
        if not isinstance(text, str):
            raise InvalidRequest(f"{param} has token ids, and this model labels the words of texts", param=param)
        encoding = model.tokenizer.encode_spans(text, job.facts.max_model_len, param, truncation)
        check_input(encoding.ids, job.facts, param)
        prompts.append(Prompt(list(encoding.ids)))
        spans = zip(encoding.ids, encoding.offsets, encoding.special_tokens_mask, strict=True)
        tokens.append(
            array("I", [n for i, span, special in spans for n in (i, *(NOWHERE if special else span))]).tobytes()
        )
    activation = "none" if fields.use_activation is False else facts.activation
    texts = [text for text in fields.input if isinstance(text, str)]
    return PreparedWords.of(
        "classify", prompts, job, fields, "input", activation=activation, texts=texts, tokens=tokens
    )


def _check_words(fields: ClassificationRequest) -> None:
    """Raise InvalidRequest if the body has a field that is not for models that classify tokens."""
    others = {"messages": fields.messages, "add_special_tokens": fields.add_special_tokens is False or None}
    for name, value in {**others, "padding": fields.padding == "max_length" or None}.items():
        if value is not None:
            raise InvalidRequest(f"{name} is not for a model that labels the words of texts; leave it out", param=name)


def prepare_predict(model: ServedModel, job: Job) -> PreparedTexts:
    """Prepare a body of /predict. Raises InvalidRequest or UnknownModel."""
    fields = parse_body(model, PredictRequest, job.body)
    inputs, truncation = fields.read_texts(), fields.truncation(job.facts.max_model_len)
    facts = _check_inputs(len(inputs), job, "inputs")
    if facts.classifies_tokens:
        raise InvalidRequest(
            "this engine's model labels the tokens of texts; it answers /classify", code=ErrorCode.WRONG_TASK
        )
    prompts = [
        _read_texts(model, job, texts, truncation, name_input("inputs", index, len(inputs)))
        for index, texts in enumerate(inputs)
    ]
    activation = "none" if fields.raw_scores else facts.activation
    return PreparedTexts.of("predict", prompts, job, fields, "inputs", activation=activation, is_batch=fields.is_batch)


def _read_texts(model: ServedModel, job: Job, texts: list[str], truncation: Truncation | None, param: str) -> Prompt:
    if len(texts) == 1:
        return Prompt(read_input(model, texts[0], truncation, job.facts, param))
    return encode_pairs(model, job.facts, [(texts[0], texts[1])], (f"{param}[0]", f"{param}[1]"), truncation)[0]


def _check_inputs(number: int, job: Job, param: str) -> ClassifierFacts:
    check_num_inputs(number, param)
    facts = ClassifierFacts.read(job.facts)
    check_answer_size(number, len(facts.labels), "labels", param)
    return facts


TASK: Final[Mapping[str, BodyKind]] = {
    **TOKEN_KINDS,
    "classify": BodyKind(prepare_classification, PreparedTexts),
    "classify_tokens": BodyKind(prepare_words, PreparedWords),
    "predict": BodyKind(prepare_predict, PreparedTexts),
}
