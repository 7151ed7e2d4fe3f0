"""The base of all models of the resource: strict camelCase fields, and rules that each have a message.

A `Rule` is written once and used three times: the API server evaluates `cel`, the parser evaluates `holds`, and the API
reference prints `message`. Used by the modules that define the resource and by `crd`.
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
    """A constraint on a field (as `Annotated` metadata) or on an object (in `ApiModel.rules`).

    The API server evaluates `cel`, in which the value is `self`. The parser calls `holds` with the parsed value. Both
    return whether the value satisfies the rule. With `holds=None`, only the API server checks the rule. `field` names
    the member of an object to which the error points.
    """

    cel: str
    message: str
    holds: Callable[[Any], bool] | None = None
    field: str | None = None

    def check(self, value: Any) -> None:
        """Raise a pydantic error with this rule's message if `value` violates it."""
        if self.holds is not None and not self.holds(value):
            raise PydanticCustomError(RULE_ERROR, "{message}", {"message": self.message, "field": self.field or ""})

    def to_manifest(self) -> dict[str, str]:
        """Return the entry for `x-kubernetes-validations`."""
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
class TenantRule(Rule):
    """A constraint on what a service sets itself. A profile, which the platform team writes, may set more.

    The parser does not evaluate it if its validation context has `is_filled`.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self._checked_by_author, handler(source))

    def _checked_by_author(self, value: Any, info: core_schema.ValidationInfo) -> Any:
        return value if (info.context or {}).get("is_filled") else self._checked(value)


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
    """Return `schema` with `rules` added after the rules that it has."""
    if not rules:
        return schema
    return schema | {RULES_KEY: [*schema.get(RULES_KEY, []), *(rule.to_manifest() for rule in rules)]}


class ApiModel(BaseModel):
    """A frozen object of the resource. Like the API server, it rejects values of the wrong type.

    It also rejects unknown fields, unless the caller allows them (`InferenceService.parse`).
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
        """Return the object as a manifest: camelCase, with defaults, without members that are None."""
        return self.model_dump(exclude_none=True)
