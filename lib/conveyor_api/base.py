"""The base of all models of the resource: strict camelCase fields, and rules with a message each.

A `Rule` is written once and read three times: the API server evaluates `cel`, the parser evaluates `holds`, the
API reference prints `message`. Used by the modules that define the resource and by `crd`; nobody else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic.alias_generators import to_camel, to_snake
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

RULES_KEY = "x-kubernetes-validations"
RULE_ERROR = "rule"


@dataclass(frozen=True, slots=True)
class Rule:
    """A constraint of a field (as `Annotated` metadata) or of an object (in `ApiModel.rules`).

    `cel` must evaluate to true on the API server, `holds` on the parsed value; both see the value as `self`.
    `field` names the member of an object that the error points at. `holds=None`: only the API server can tell.
    """

    cel: str
    message: str
    holds: Callable[[Any], bool] | None = None
    field: str | None = None

    def check(self, value: Any) -> None:
        """Raise a pydantic error with this rule's sentence if `value` breaks it."""
        if self.holds is not None and not self.holds(value):
            raise PydanticCustomError(RULE_ERROR, "{message}", {"message": self.message, "field": self.field or ""})

    def to_manifest(self) -> dict[str, str]:
        """The entry of `x-kubernetes-validations`."""
        entry = {"rule": self.cel, "message": self.message}
        return entry | {"fieldPath": f".{self.field}"} if self.field else entry

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return add_rules(handler(schema), (self,))

    def _checked(self, value: Any) -> Any:
        self.check(value)
        return value


@dataclass(frozen=True, slots=True)
class KeyedBy:
    """Marks a list of objects as a map: no two entries share `key`, and server-side apply merges entry by entry."""

    key: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(schema) | {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [self.key]}

    def _checked(self, entries: list[Any]) -> list[Any]:
        seen = [getattr(entry, to_snake(self.key)) for entry in entries]
        for key in seen:
            if seen.count(key) > 1:
                raise PydanticCustomError("duplicate", "Duplicate value: {key}", {"key": key})
        return entries


def add_rules(schema: JsonSchemaValue, rules: tuple[Rule, ...]) -> JsonSchemaValue:
    """`schema` with `rules` added after those it has."""
    if not rules:
        return schema
    return schema | {RULES_KEY: [*schema.get(RULES_KEY, []), *(rule.to_manifest() for rule in rules)]}


class ApiModel(BaseModel):
    """A frozen object of the resource. Loosely typed values are refused, as the API server does.

    So are unknown fields, unless the reader says otherwise (`InferenceService.parse`).
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        for rule in self.rules:
            rule.check(self)
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        found = handler.resolve_ref_schema(handler(schema))
        found.update(add_rules(found, cls.rules))
        return found

    def to_manifest(self) -> dict[str, Any]:
        """The object as a manifest: camelCase, defaults included, absent members left out."""
        return self.model_dump(exclude_none=True)
