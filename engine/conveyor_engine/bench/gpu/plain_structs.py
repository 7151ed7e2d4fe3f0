"""msgspec's structs as dataclasses, for a machine without msgspec. Called by `stage` before the engine is imported.

They are enough for an engine in one process: `msgpack` is pickle here, for what a process writes and reads itself.
Whatever encodes messages for others needs msgspec itself. Objects are made more slowly, so a result says it (`about`).
A plugin of pytest too, for its workers.
"""

import dataclasses
import importlib.util
import pickle
import sys
from types import ModuleType, SimpleNamespace
from typing import Any


class Struct:
    """The base class; of its options those count that change what Python code sees."""

    def __init_subclass__(cls, kw_only: bool = False, frozen: bool = False, **_: Any) -> None:
        dataclasses.dataclass(kw_only=kw_only, unsafe_hash=frozen)(cls)


_msgpack = SimpleNamespace(encode=pickle.dumps, decode=lambda data, type: pickle.loads(data))


def pytest_configure() -> None:
    """In each process of pytest, before it imports tests."""
    install()


def install() -> bool:
    """Puts them in msgspec's place if it is not installed. Returns whether they are there."""
    if "msgspec" not in sys.modules and importlib.util.find_spec("msgspec") is None:
        module, structs = ModuleType("msgspec"), ModuleType("msgspec.structs")
        structs.replace = dataclasses.replace  # type: ignore[attr-defined]
        values = {"Struct": Struct, "field": dataclasses.field, "structs": structs, "msgpack": _msgpack}
        for name, value in values.items():
            setattr(module, name, value)
        sys.modules.update({"msgspec": module, "msgspec.structs": structs})
    return getattr(sys.modules.get("msgspec"), "Struct", None) is Struct
