"""Makes engine requests of bodies that ask for labels, one for each input. Runs in worker processes."""

from collections.abc import Mapping
from typing import Final

from conveyor_engine.serving.preparing.jobs import Kind, ServedModel, parse_body, too_many
from conveyor_engine.serving.preparing.pairs import encode_pairs
from conveyor_engine.serving.preparing.prompts import PreparedPrompts, Prompt, check_answer_size, read_input
from conveyor_engine.tasks.classify.bodies import ClassificationRequest, PredictRequest
from conveyor_engine.text.tokenizer import Truncation
from conveyor_engine.wire.classification import Activation, ClassifierFacts
from conveyor_engine.wire.worker import Job


class PreparedTexts(PreparedPrompts, frozen=True, kw_only=True, array_like=True):
    """An admissible request, in the inputs' order."""

    activation: Activation  # what makes scores of the logits
    is_batch: bool = True  # else its one input has no list around its answer


def prepare_classification(model: ServedModel, job: Job) -> PreparedTexts:
    """Raises InvalidRequest or UnknownModel."""
    fields = parse_body(model, ClassificationRequest, job.body)
    facts = _check_inputs(len(fields.input), job, "input")
    truncation = fields.truncation(job.facts.max_model_len)
    prompts = [Prompt(read_input(model, text, truncation, job.facts, "input")) for text in fields.input]
    activation = "none" if fields.use_activation is False else facts.activation
    return PreparedTexts.of("classify", prompts, job, fields, activation=activation)


def prepare_predict(model: ServedModel, job: Job) -> PreparedTexts:
    """Raises InvalidRequest or UnknownModel."""
    fields = parse_body(model, PredictRequest, job.body)
    inputs, truncation = fields.read_texts(), fields.truncation(job.facts.max_model_len)
    facts = _check_inputs(len(inputs), job, "inputs")
    prompts = [_read_texts(model, job, texts, truncation) for texts in inputs]
    activation = "none" if fields.raw_scores else facts.activation
    return PreparedTexts.of("predict", prompts, job, fields, activation=activation, is_batch=fields.is_batch)


def _read_texts(model: ServedModel, job: Job, texts: list[str], truncation: Truncation | None) -> Prompt:
    if len(texts) == 1:
        return Prompt(read_input(model, texts[0], truncation, job.facts, "inputs"))
    return encode_pairs(model, job.facts, [(texts[0], texts[1])], ("inputs", "inputs"), truncation)[0]


def _check_inputs(number: int, job: Job, param: str) -> ClassifierFacts:
    if number > job.num_requests_max:
        raise too_many("the number of inputs", number, job, param)
    facts = ClassifierFacts.read(job.facts)
    check_answer_size(number, len(facts.labels), "labels", param)
    return facts


TASK: Final[Mapping[str, Kind]] = {
    "classify": Kind(prepare_classification, PreparedTexts),
    "predict": Kind(prepare_predict, PreparedTexts),
}
