"""The schemas of bodies that request labels, with the names of vLLM and text-embeddings-inference. Pure."""

from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from conveyor_engine.serving.preparing.fields import Place
from conveyor_engine.serving.preparing.inputs import InputFields
from conveyor_engine.serving.preparing.tei import TeiScoreFields

_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}


def _parse_inputs(value: object) -> object:
    """Return the value if it is a text, a pair of texts, or a list of lists with one or two texts each."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        is_right = all(map(_is_texts, value))
    else:
        is_right = _is_texts([value] if isinstance(value, str) else value)
    if not is_right:
        raise PydanticCustomError(
            "inputs", "must be a text, a pair of texts, or a list of lists with one or two texts each; no text is empty"
        )
    return value


def _is_texts(value: object) -> bool:
    """Return whether the value is a list of one or two texts."""
    return isinstance(value, list) and 0 < len(value) <= 2 and all(isinstance(text, str) and text for text in value)


def _list_of(items: dict[str, Any], most: int | None = None) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1} | ({} if most is None else {"maxItems": most})


class ClassificationRequest(InputFields):
    """POST /classify."""

    place = Place.CLASSIFY

    use_activation: bool | None = True
    """Whether to apply the model's activation; if false, the response has logits."""


class PredictRequest(TeiScoreFields):
    """POST /predict."""

    inputs: Annotated[
        Any,
        PlainValidator(_parse_inputs),
        WithJsonSchema({"anyOf": [_TEXT, _list_of(_TEXT, 2), _list_of(_list_of(_TEXT, 2))]}),
    ]
    """A text, a pair of texts, or a list of lists with one or two texts each. Each is classified by itself."""

    @property
    def is_batch(self) -> bool:
        """Return whether the response has a list of predictions for each input."""
        return isinstance(self.inputs, list) and isinstance(self.inputs[0], list)

    def read_texts(self) -> list[list[str]]:
        """Return the one or two texts of each input."""
        if self.is_batch:
            return list(self.inputs)
        return [self.inputs if isinstance(self.inputs, list) else [self.inputs]]
