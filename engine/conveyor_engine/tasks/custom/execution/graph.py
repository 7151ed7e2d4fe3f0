"""Runs the graph of an exported program, operator by operator. Used by `exported`.

The graph is data: each node names an operator and its arguments. Operators that compute sizes come from a fixed table.
All other operators are ATen's, and `operators` lists them. They take and return tensors and numbers, take strings only
for known arguments, and change no weight. So a file can choose what is computed, but it cannot read or write files,
leave the memory of its tensors, or call other Python code.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from conveyor_engine.errors import ModelError
from conveyor_engine.tasks.custom.execution.archive import DTYPES
from conveyor_engine.tasks.custom.execution.operators import ALLOWED, CHECKED, IN_PLACE

_ATEN: Final = re.compile(r"torch\.ops\.aten\.([A-Za-z0-9_]+)\.([A-Za-z0-9_]+)")
_REGISTERED: Final = frozenset(torch._C._dispatch_get_all_op_names())
"""ATen without the overloads that only TorchScript has. They work on numbers and do not check them."""
_NAME: Final = re.compile(r"\w{1,1000}", re.ASCII)
# Operators that compute sizes.
_NUMBERS: Final[Mapping[str, Callable[..., Any]]] = {
    **{f"_operator.{name}": getattr(operator, name) for name in (
        "add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pos", "eq", "ne", "lt", "le", "gt", "ge", "and_",
        "or_", "not_", "xor", "lshift", "rshift", "getitem",
    )},
    "torch.sym_max": max, "torch.sym_min": min, "torch.sym_int": int, "torch.sym_float": float,
    "torch.sym_not": operator.not_, "torch.sym_sum": sum,
    "torch.sym_ite": lambda which, this, other: this if which else other,
    "math.trunc": math.trunc, "math.ceil": math.ceil, "math.floor": math.floor,
    **{f"torch._sym_{name}": getattr(math, name) for name in ("sqrt", "log2")},
}  # fmt: skip
_STRINGS: Final = frozenset(
    ["norm", "reduce", "rounding_mode", "interpolation", "UPLO", "approximate", "ord", "padding", "side", "mode",
     "pad_mode", "equation", "padding_side", "indexing", "activation", "assert_msg"]
)  # fmt: skip
_TAKEN: Final = frozenset(
    ["Tensor", "Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]", "Optional[List[Tensor]]", "number",
     "Optional[number]", "List[number]", "int", "Optional[int]", "List[int]", "Optional[List[int]]", "float",
     "Optional[float]", "List[float]", "Optional[List[float]]", "bool", "Optional[bool]", "List[bool]", "str",
     "Optional[str]", "Device", "Optional[Device]", "Layout", "MemoryFormat", "Optional[Generator]"]
)  # fmt: skip
_GIVEN: Final = frozenset(["Tensor", "List[Tensor]", "int", "float", "bool", "number", "List[int]"])
# Arguments that torch also takes as numbers, which it does not check.
_KINDS: Final[Mapping[str, type]] = {
    "ScalarType": torch.dtype, "Layout": torch.layout, "MemoryFormat": torch.memory_format, "Device": torch.device,
}  # fmt: skip
_MEMORY_FORMATS: Final = {
    1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d, 4: torch.preserve_format,
}  # fmt: skip
# Operators that are skipped: checks of shapes and devices, which held at export. The engine itself checks sizes.
_SKIPPED: Final = frozenset(
    [
        "_assert_tensor_metadata",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
        "_assert_scalar",
        "_assert_async",
    ]
)
_KEYWORD: Final = 2


@dataclass(frozen=True, slots=True)
class _Ref:
    """A reference to a value by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class _Step:
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str | None, ...]  # names of its results; None: a result without a name
    gives_list: bool
    last: tuple[str, ...]  # names of the values that no later step needs
    changed: str | None = None  # name of the value that it changes


class Graph:
    """The steps of a program. The constructor checks all of them."""

    def __init__(self, graph: Mapping[str, Any], outputs: Sequence[str], device: torch.device, kept: set[str]) -> None:
        """kept: names of weights, constants and inputs, which no step may change.

        Raises ModelError, or Python's own errors for JSON that does not have the expected form.
        """
        self._device, self._outputs = device, tuple(outputs)
        self._kept = kept
        steps = [self._read(node) for node in graph["nodes"]]
        self._steps = _release(list(filter(None, steps)), set(outputs) | kept)
        self._changes = any(step.changed is not None for step in self._steps)

    def run(self, weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> list[Any]:
        """Compute the outputs from the values of weights and constants, and of inputs, by name."""
        values = {**weights, **inputs}
        fixed = {weight.untyped_storage().data_ptr() for weight in weights.values()} if self._changes else set()
        for step in self._steps:
            if step.changed is not None and values[step.changed].untyped_storage().data_ptr() in fixed:
                raise ModelError(_explain_change(str(step.call)))
            found = step.call(*(_find(values, arg) for arg in step.args),
                              **{name: _find(values, arg) for name, arg in step.kwargs.items()})  # fmt: skip
            if len(step.names) == 1 and not step.gives_list:
                values[step.names[0]] = found  # type: ignore[index]
            else:
                values.update((name, each) for name, each in zip(step.names, found, strict=True) if name is not None)
            for name in step.last:
                del values[name]
        return [values[name] for name in self._outputs]

    def _read(self, node: Mapping[str, Any]) -> _Step | None:
        call = _find_operator(node["target"])
        if call is None:
            return None
        args, kwargs = [], {}
        for given in node["inputs"]:
            value = self._read_argument(given["arg"])
            if given["kind"] == _KEYWORD:
                kwargs[_check_name(given["name"])] = value
            else:
                args.append(value)
        changed = None
        if isinstance(call, torch._ops.OpOverload):
            _check_arguments(node["target"], call, args, kwargs)
            if call._schema.is_mutable:
                changed = self._find_changed(node["target"], args)
            call = CHECKED.get(f"{call.__name__}", call)
        names, gives_list = _read_outputs(node["outputs"])
        return _Step(call, tuple(args), kwargs, names, gives_list, (), changed)

    def _find_changed(self, target: str, args: list[Any]) -> str:
        if not args or not isinstance(args[0], _Ref) or args[0].name in self._kept:
            raise ModelError(_explain_change(target))
        return args[0].name

    def _read_argument(self, arg: Mapping[str, Any]) -> Any:
        ((kind, value),) = arg.items()
        match kind:
            case "as_none":
                return None
            case "as_tensor":
                return _Ref(_check_name(value["name"]))
            case "as_tensors":
                return [_Ref(_check_name(each["name"])) for each in value]
            case "as_optional_tensors":
                return [self._read_argument(each) for each in value]
            case "as_optional_tensor":
                return self._read_argument(value)
            case "as_sym_int" | "as_sym_float" | "as_sym_bool":
                return _read_number(value)
            case "as_sym_ints" | "as_sym_floats" | "as_sym_bools":
                return [_read_number(each) for each in value]
            case "as_int" | "as_bool" | "as_string":
                return _check_type(value)
            case "as_float":
                return _read_float(value)
            case "as_ints" | "as_bools" | "as_strings":
                return [_check_type(each) for each in value]
            case "as_floats":
                return list(map(_read_float, value))
            case "as_scalar_type":
                return DTYPES[value]
            case "as_memory_format":
                return _MEMORY_FORMATS[value]
            case "as_layout":
                return torch.strided
            case "as_device":
                return self._device
        raise ModelError(f"the program has an argument of the kind {kind!r}, which this engine does not run")


def _find_operator(target: str) -> Callable[..., Any] | None:
    """Return the operator; None for a skipped check. Raises ModelError for an operator that is not listed."""
    if (number := _NUMBERS.get(target)) is not None:
        return number
    match = _ATEN.fullmatch(target)
    if match is None:
        raise ModelError(
            f"the program calls {target[:200]!r}, which this engine does not run: it runs operators of ATen that "
            "compute tensors. Programs with control flow or operators of other libraries are run as a class of your "
            "own (engine.modelClass)"
        )
    if match[1] in _SKIPPED:
        return None
    found = None
    if not ALLOWED.isdisjoint((match[1], f"{match[1]}.{match[2]}")):
        found = getattr(getattr(torch.ops.aten, match[1], None), match[2], None)
    if not isinstance(found, torch._ops.OpOverload) or not _is_plain(found):
        raise ModelError(
            f"the program calls {target[:200]!r}, which this engine does not run: it runs a list of ATen's operators "
            "that check their arguments. Save program.run_decompositions({}), which has no "
            "operators that change tensors, or program.run_decompositions(), which has simpler operators. If neither "
            "helps, write a class of your own (engine.modelClass)"
        )
    return found


def _is_plain(operator: torch._ops.OpOverload) -> bool:
    """Return whether the operator only computes tensors and numbers from tensors, numbers and known strings."""
    schema = operator._schema
    if ".".join(filter(None, (schema.name, schema.overload_name))) not in _REGISTERED:
        return False
    strings = {arg.name for arg in schema.arguments if "str" in str(arg.type)}
    if schema.is_mutable and schema.name.removeprefix("aten::") not in IN_PLACE:
        return False
    if not {str(arg.type) for arg in schema.arguments} <= _TAKEN or strings - _STRINGS:
        return False
    return bool(schema.returns) and {str(given.type) for given in schema.returns} <= _GIVEN


def _check_arguments(target: str, operator: torch._ops.OpOverload, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Raise ModelError for arguments that torch does not check.

    They are numbers in place of types, and statistics that a normalization would update.
    """
    declared = {arg.name: str(arg.real_type) for arg in operator._schema.arguments}
    given = dict(zip(declared, args, strict=False)) | kwargs
    for name, value in given.items():
        kind = _KINDS.get(declared.get(name, "").removeprefix("Optional[").removesuffix("]"))
        if kind is not None and value is not None and not isinstance(value, kind):
            raise ModelError(f"{name!r} of {target} of the program must be a {kind.__name__}, not {str(value)[:100]}")
    updates = given.get("training", given.get("use_input_stats", False)) is not False
    if updates and (given.get("running_mean") is not None or given.get("running_var") is not None):
        raise ModelError(_explain_change(target))


def _explain_change(target: str) -> str:
    return (
        f"{target} of the program changes a weight, a buffer or an input, and a model keeps nothing between requests: "
        "export it in evaluation mode (model.eval())"
    )


def _read_outputs(outputs: Sequence[Mapping[str, Any]]) -> tuple[tuple[str | None, ...], bool]:
    """Return the names of the results, and whether the operator returns them as a list."""
    names: list[str | None] = []
    for given in outputs:
        ((kind, value),) = given.items()
        if kind == "as_tensors":
            return tuple(_check_name(each["name"]) for each in value), True
        if kind == "as_tensor":
            names.append(_check_name(value["name"]))
        elif kind in ("as_sym_int", "as_sym_float", "as_sym_bool"):
            names.append(_check_name(value["as_name"]))
        elif kind == "as_none":
            names.append(None)
        else:
            raise ModelError(f"the program has an output of the kind {kind!r}, which this engine does not run")
    return tuple(names), len(names) > 1


def _read_number(value: Mapping[str, Any]) -> Any:
    ((kind, own),) = value.items()
    return _Ref(_check_name(own)) if kind == "as_name" else _check_type(own)


def _read_float(value: Any) -> float:
    """Return a number. Infinity is a string in the file, because JSON cannot represent it."""
    return float(value)


def _check_name(name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ModelError(f"the program has an invalid name: {str(name)[:100]!r}")
    return name


def _check_type(value: Any) -> Any:
    if type(value) not in (int, float, bool, str):
        raise ModelError(f"the program has an argument of the type {type(value).__name__}")
    return value


def _find(values: Mapping[str, Any], arg: Any) -> Any:
    if type(arg) is _Ref:
        return values[arg.name]
    if type(arg) is list:
        return [_find(values, each) for each in arg]
    return arg


def _list_refs(step: _Step) -> set[str]:
    found = set()
    for arg in (*step.args, *step.kwargs.values()):
        for each in arg if isinstance(arg, list) else [arg]:
            if isinstance(each, _Ref):
                found.add(each.name)
    return found


def _release(steps: list[_Step], kept: set[str]) -> list[_Step]:
    """Set for each step which values can be freed after it, because no later step needs them."""
    needed = set(kept)
    done = []
    for step in reversed(steps):
        names = {name for name in step.names if name is not None}
        last = (_list_refs(step) | names) - needed
        needed |= last
        done.append(
            _Step(step.call, step.args, step.kwargs, step.names, step.gives_list, tuple(sorted(last)), step.changed)
        )
    return done[::-1]
