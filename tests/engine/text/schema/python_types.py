"""The types of Python's libraries for typed data, each with the JSON schema that its library writes."""

import datetime
import decimal
import enum
import fractions
import ipaddress
import pathlib
import re
import uuid
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import annotated_types
import msgspec
import pydantic
from pydantic import BaseModel, Field
from typing_extensions import TypedDict


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Point(NamedTuple):
    x: float
    y: int = 0


class Movie(TypedDict, total=False):
    name: str
    year: int


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    age: Annotated[int, Field(ge=0)]


class Node(BaseModel):
    value: int
    next: "Node | None" = None
    children: "list[Node]" = []


class Closed(BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    a: str


class Open(BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    a: str


Json = pydantic.JsonValue
PYDANTIC: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "None": None,
    "bytes": bytes,
    "Any": Any,
    "object": object,
    "str, lengths": Annotated[str, Field(min_length=1, max_length=9)],
    "str, pattern": Annotated[str, Field(pattern="^[a-c]+$")],
    "int, bounds": Annotated[int, Field(gt=0, lt=9)],
    "float, gt and le": Annotated[float, Field(gt=0, le=0.5)],
    "int, multiple_of": Annotated[int, Field(multiple_of=5)],
    "Decimal": decimal.Decimal,
    "Decimal, digits": Annotated[decimal.Decimal, Field(max_digits=6, decimal_places=2)],
    "Fraction": fractions.Fraction,
    "date": datetime.date,
    "datetime": datetime.datetime,
    "time": datetime.time,
    "timedelta": datetime.timedelta,
    "AwareDatetime": pydantic.AwareDatetime,
    "PastDate": pydantic.PastDate,
    "FutureDatetime": pydantic.FutureDatetime,
    "UUID": uuid.UUID,
    "UUID4": pydantic.UUID4,
    "Enum": Color,
    "Literal": Literal["a", 1, None],
    "list[int]": list[int],
    "list, lengths": Annotated[list[int], Field(min_length=1, max_length=3)],
    "set[int]": set[int],
    "frozenset[str]": frozenset[str],
    "set[Enum]": set[Color],
    "set[bool]": set[bool],
    "tuple[int, str]": tuple[int, str],
    "tuple[int, ...]": tuple[int, ...],
    "deque[int]": deque[int],
    "Sequence[int]": Sequence[int],
    "dict[str, int]": dict[str, int],
    "dict[int, str]": dict[int, str],
    "dict[Enum, int]": dict[Color, int],
    "dict[Literal, int]": dict[Literal["a", "b"], int],
    "dict[constr, int]": dict[Annotated[str, Field(pattern="^[a-z]+$")], int],
    "dict[UUID, int]": dict[uuid.UUID, int],
    "dict[date, int]": dict[datetime.date, int],
    "dict, lengths": Annotated[dict[str, int], Field(min_length=1, max_length=2)],
    "Mapping": Mapping[str, int],
    "OrderedDict": OrderedDict[str, int],
    "int | str": int | str,
    "int | None": int | None,
    "a discriminated union": Annotated[Cat | Dog, Field(discriminator="kind")],
    "a union of models": Cat | Dog,
    "BaseModel": Cat,
    "a recursive model": Node,
    "extra=forbid": Closed,
    "extra=allow": Open,
    "NamedTuple": Point,
    "TypedDict": Movie,
    "Path": pathlib.Path,
    "FilePath": pydantic.FilePath,
    "DirectoryPath": pydantic.DirectoryPath,
    "IPv4Address": ipaddress.IPv4Address,
    "IPv6Address": ipaddress.IPv6Address,
    "IPv4Network": ipaddress.IPv4Network,
    "IPv6Network": ipaddress.IPv6Network,
    "IPv4Interface": ipaddress.IPv4Interface,
    "IPvAnyAddress": pydantic.IPvAnyAddress,
    "IPvAnyNetwork": pydantic.IPvAnyNetwork,
    "IPvAnyInterface": pydantic.IPvAnyInterface,
    "AnyUrl": pydantic.AnyUrl,
    "HttpUrl": pydantic.HttpUrl,
    "PostgresDsn": pydantic.PostgresDsn,
    "SecretStr": pydantic.SecretStr,
    "Base64Bytes": pydantic.Base64Bytes,
    "Base64UrlStr": pydantic.Base64UrlStr,
    "Json[int]": pydantic.Json[int],
    "JsonValue": Json,
    "ByteSize": pydantic.ByteSize,
    "Pattern": re.Pattern[str],
    "StrictInt": pydantic.StrictInt,
    "PositiveFloat": pydantic.PositiveFloat,
    "NegativeInt": pydantic.NegativeInt,
    "FiniteFloat": pydantic.FiniteFloat,
    "complex": complex,
    "annotated_types.Len": Annotated[list[str], annotated_types.Len(2, 2)],
}


class Struct(msgspec.Struct):
    a: int
    b: str | None = None


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    a: int


class Row(msgspec.Struct, array_like=True):
    a: int
    b: str = ""


class Get(msgspec.Struct, tag="get"):
    key: str


class Put(msgspec.Struct, tag="put"):
    key: str
    value: int


class Tree(msgspec.Struct):
    value: int
    nodes: "list[Tree]" = []


MSGSPEC: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "None": None,
    "bytes": bytes,
    "bytearray": bytearray,
    "Any": Any,
    "Enum": Color,
    "Literal": Literal["a", 1],
    "Decimal": decimal.Decimal,
    "UUID": uuid.UUID,
    "date": datetime.date,
    "datetime": datetime.datetime,
    "time": datetime.time,
    "timedelta": datetime.timedelta,
    "str, lengths": Annotated[str, msgspec.Meta(min_length=1, max_length=9)],
    "str, pattern": Annotated[str, msgspec.Meta(pattern="^[a-c]+$")],
    "int, bounds": Annotated[int, msgspec.Meta(gt=0, lt=9)],
    "float, gt and le": Annotated[float, msgspec.Meta(gt=0, le=0.5)],
    "int, multiple_of": Annotated[int, msgspec.Meta(multiple_of=5)],
    "datetime, tz": Annotated[datetime.datetime, msgspec.Meta(tz=True)],
    "list[int]": list[int],
    "list, lengths": Annotated[list[int], msgspec.Meta(min_length=1, max_length=3)],
    "set[int]": set[int],
    "frozenset[str]": frozenset[str],
    "tuple[int, str]": tuple[int, str],
    "tuple[int, ...]": tuple[int, ...],
    "dict[str, int]": dict[str, int],
    "dict[int, str]": dict[int, str],
    "dict[Literal, int]": dict[Literal["a", "b"], int],
    "dict, keys with lengths": dict[Annotated[str, msgspec.Meta(min_length=2)], int],
    "dict, lengths": Annotated[dict[str, int], msgspec.Meta(min_length=1, max_length=2)],
    "int | str": int | str,
    "int | None": int | None,
    "Struct": Struct,
    "forbid_unknown_fields": Strict,
    "array_like": Row,
    "tagged Structs": Get | Put,
    "a recursive Struct": Tree,
    "NamedTuple": Point,
    "TypedDict": Movie,
    "Raw": msgspec.Raw,
}


def pydantic_schemas() -> dict[str, Any]:
    """Return the schema of each type of pydantic that has one."""
    schemas: dict[str, Any] = {}
    for name, each in PYDANTIC.items():
        try:
            schemas[name] = pydantic.TypeAdapter(each).json_schema()
        except pydantic.errors.PydanticInvalidForJsonSchema:
            continue
    return schemas


def msgspec_schemas() -> dict[str, Any]:
    """Return the schema of each type of msgspec."""
    return {name: msgspec.json.schema(each) for name, each in MSGSPEC.items()}
