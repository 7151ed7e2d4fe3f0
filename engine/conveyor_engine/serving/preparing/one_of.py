"""Validates objects of several types that one field distinguishes, such as the blocks of a message.

Used by the schemas of bodies and of tools. The value of the field selects the pydantic model, and only that model's
errors are reported.
"""

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, Discriminator, GetCoreSchemaHandler, Tag, WithJsonSchema
from pydantic_core import CoreSchema, PydanticCustomError


class OneOf:
    """For use in `Annotated`: an object of one of these models. The `Literal` values of `key` identify each model."""

    def __init__(
        self,
        key: str,
        *models: type[BaseModel],
        default: str = "",
        other: type[BaseModel] | None = None,
        refused: Mapping[str, str] = {},
    ) -> None:
        """Keep what identifies the models.

        default: the value of the key in objects without it; empty: the key is required.
        other: the model for objects with any other value; None: they are refused.
        refused: what the error says about some values, after the value.
        """
        self._key, self._default, self._refused = key, default, refused
        self._other = f"<{other.__name__}>" if other else ""
        self._tags = {value: f"<{model.__name__}>" for model in models for value in _find_values(model, key)}
        tagged: list[Any] = [Annotated[model, Tag(f"<{model.__name__}>")] for model in models]
        if other:
            tagged.append(Annotated[other, Tag(self._other), WithJsonSchema(self._describe_other())])
        self._union: Any = tagged[0] if len(tagged) == 1 else Annotated[reduce(or_, tagged), Discriminator(self._find)]

    def _describe_other(self) -> dict[str, Any]:
        value = {"type": "string", "not": {"enum": list(self._tags)}}
        return {"type": "object", "properties": {self._key: value}, "required": [self._key]}

    def __get_pydantic_core_schema__(self, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(Annotated[self._union, BeforeValidator(self._check)])

    def _find(self, value: Any) -> str:
        """Return the tag of the value's model. A tag is not an identifier, so errors do not name it as a field."""
        given = value.get(self._key) if isinstance(value, dict) else getattr(value, self._key)
        return self._tags.get(self._default if given is None else given, self._other)

    def _check(self, value: object) -> object:
        if not isinstance(value, dict):
            raise PydanticCustomError("dict_type", "must be an object")
        given, known = value.get(self._key), ", ".join(self._tags)
        if given is None:
            if self._default:
                return value
            raise PydanticCustomError("missing_key", f"must have a {self._key}: one of {known}")
        if not isinstance(given, str) or (given not in self._tags and not self._other):
            why = self._refused.get(str(given), f"this engine takes {known}")
            raise PydanticCustomError("unsupported", f"has the {self._key} {given!r:.100}; {why}")
        return value


def _find_values(model: type[BaseModel], key: str) -> list[str]:
    """Return the strings in the `Literal` of the field `key`, without null."""
    annotation = model.model_fields[key].annotation
    return [value for each in (annotation, *get_args(annotation)) for value in get_args(each) if isinstance(value, str)]
