"""Records the kernel settings that a whole cluster changes, and restores them after it is removed.

Called by `local`. kube-proxy's settings are not here, because its configuration prevents it from changing any.
"""

import json
from pathlib import Path

# The settings that `network` and the kubelet (`setupKernelTunables` of its container manager) change.
_OURS = {
    "net/ipv4/ip_forward": "1",
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
_TREE = Path("/proc/sys")


def note(folder: Path) -> None:
    """Record the settings that will change, before they change."""
    before = {name: _read(name) for name, ours in _OURS.items() if _read(name) != ours}
    partial = _file(folder).with_suffix(".partial")
    partial.write_text(json.dumps(before))
    partial.rename(_file(folder))


def noted(folder: Path) -> dict[str, str]:
    """Return names below /proc/sys with their values before the cluster; empty if it has changed none."""
    return json.loads(_file(folder).read_text()) if _file(folder).exists() else {}


def restore(folder: Path) -> None:
    """Restore the recorded values. Values that others have changed since then stay."""
    for name, before in noted(folder).items():
        if _read(name) == _OURS[name]:
            (_TREE / name).write_text(before)


def _file(folder: Path) -> Path:
    return folder / "sysctls.json"


def _read(name: str) -> str:
    return (_TREE / name).read_text().strip()
