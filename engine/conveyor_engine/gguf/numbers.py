"""Reads numbers of GGUF metadata, and how positions are scaled. Used by `config`."""

import math
import struct
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from conveyor_engine.errors import ModelError
from conveyor_engine.gguf.header import Header

Number = TypeVar("Number", int, float)
LLAMA3_LIMITS: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_number(header: Header, key: str, kind: type[Number], default: Number | None = None) -> Number:
    """Return a number of the architecture. Raises ModelError."""
    value = header.find(key)
    if value is None and default is not None:
        return default
    if type(value) is int and kind is float:
        value = float(value)
    if type(value) is not kind or not math.isfinite(value):
        raise ModelError(f"the GGUF file's {header.architecture}.{key} is {str(value)[:100]}, not one {kind.__name__}")
    return value


def read_each(header: Header, key: str, count: int) -> list[int]:
    """Return a number for each of `count` layers. The file has one for all, or a list. Raises ModelError."""
    values = header.find(key)
    values = values if isinstance(values, list) else [values] * count
    if len(values) != count or not all(isinstance(value, int) for value in values):
        raise ModelError(f"the GGUF file's {header.architecture}.{key} is {str(values)[:100]}, not {count} ints")
    return [int(value) for value in values]


def read_rope(header: Header) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": read_theta(header, "rope.freq_base", 10_000.0)}
    scaling = header.find("rope.scaling.type")
    if "rope_freqs.weight" in header.tensors:
        return rope | _read_llama3(header, rope["rope_theta"])
    factors = header.find("rope.scaling.factor"), header.find("rope.scale_linear")  # the second is the older name
    if scaling is None and (factor := next((each for each in factors if each), None)) not in (None, 1):
        return rope | {"rope_type": "linear", "factor": factor}
    if scaling in (None, "none", "longrope"):  # long and short factors are tensors
        return rope
    if scaling not in ("linear", "yarn"):
        raise ModelError(f"the GGUF file scales positions by {scaling!r}, which this engine does not read")
    rope |= {"rope_type": scaling, "factor": read_number(header, "rope.scaling.factor", float)}
    if scaling == "yarn":
        original = read_number(header, "rope.scaling.original_context_length", int)
        rope["original_max_position_embeddings"] = original
        if (attention := header.find("rope.scaling.attn_factor")) not in (None, 1.0):
            raise ModelError(f"the GGUF file scales attention by {attention!r}, which this engine does not read")
    return rope


def read_theta(header: Header, key: str, default: float) -> float:
    theta = read_number(header, key, float, default)
    if theta < 1:
        raise ModelError(f"the GGUF file's {header.architecture}.{key} is {theta}")
    return theta


def _read_llama3(header: Header, theta: float) -> dict[str, Any]:
    """Return the scaling of Llama 3 from the factors that llama.cpp stores in place of its numbers."""
    factors = read_floats(header, "rope_freqs.weight")
    scaling = {"rope_type": "llama3", "factor": max(factors)} | LLAMA3_LIMITS
    expected = _llama3_factors(scaling, theta, len(factors))
    if any(abs(found / each - 1) > 1e-3 for found, each in zip(factors, expected, strict=True)):
        raise ModelError("the GGUF file's rope_freqs.weight is not Llama 3's, so this engine does not read it")
    return scaling


def _llama3_factors(scaling: Mapping[str, Any], theta: float, number: int) -> list[float]:
    """Return by how much each frequency is divided, as llama.cpp's converter computes it."""
    low, high, original = (scaling[key] for key in LLAMA3_LIMITS)
    factors = []
    for i in range(number):
        length = 2 * math.pi * theta ** (i / number)
        smooth = min(1.0, max(0.0, (original / length - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return factors


def read_floats(header: Header, name: str) -> list[float]:
    """Return the numbers of a short tensor. Raises ModelError."""
    place = header.tensors[name]
    if place.kind.name != "F32" or place.num_bytes > 1 << 16:
        raise ModelError(f"the GGUF file's {name} is not a short tensor in 32 bits")
    values = list(struct.unpack(f"<{place.num_bytes // 4}f", place.read()))
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ModelError(f"the GGUF file's {name} has a number that is not positive")
    return values
