"""Runs a Python module in a process that ends when its parent ends: `python -m conveyor_local.leash PARENT MODULE ...`.

`processes` starts engines, downloads and jobs with it. PARENT is the parent's process ID. The kernel kills the process
if the parent is killed. Where the kernel cannot do that, a thread checks for the parent every second. The processes
that an engine starts itself end when their connection to it closes.
"""

import ctypes
import os
import runpy
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 1.0


def end_with(parent: int) -> None:
    """Let this process be killed when the process `parent`, its parent, ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_look_for, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def _look_for(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    module = sys.argv[2]
    sys.argv[:] = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
