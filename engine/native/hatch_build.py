"""Hatchling's build hook: puts the compiled CPU kernels into the wheel.

If the kernels compile, the wheel is for this platform and any Python 3. Otherwise the wheel is pure, and on CPUs the
engine computes with torch alone. If `CONVEYOR_REQUIRE_NATIVE=1` is set, a failure to compile is an error instead.
"""

import os
import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_COMPILE = runpy.run_path(str(Path(__file__).with_name("compile.py")))


class NativeBuildHook(BuildHookInterface[Any]):
    """Runs before a wheel (editable or not) is put together."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the library. If this works, mark the wheel as one for this platform."""
        try:
            library: Path = _COMPILE["compile_library"]()
        except _COMPILE["CompileError"] as error:
            if os.environ.get("CONVEYOR_REQUIRE_NATIVE") == "1":
                raise
            self.app.display_warning(f"Conveyor's CPU kernels were left out, torch will stand in: {error}")
            _COMPILE["LIBRARY"].unlink(missing_ok=True)  # a library from an earlier build would be stale
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["artifacts"].append(f"/{library.relative_to(self.root).as_posix()}")
