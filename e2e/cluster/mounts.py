"""Finds and removes the mounts below a folder: volumes of pods, and namespaces of networks.

Called by `local` and `second` before they remove the folder.
"""

from pathlib import Path

from e2e.cluster import programs


def below(folder: Path) -> list[str]:
    """Return the mount points in their order, so that an inner one follows its outer one."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split()[4].encode().decode("unicode_escape") for line in lines]
    return [point for point in points if point.startswith(f"{folder}/")]


def remove_below(folder: Path) -> None:
    for point in reversed(below(folder)):
        programs.run("umount", "--lazy", point, check=True)
    if left := below(folder):  # it may contain a user's data, which must not be deleted
        raise RuntimeError(f"still mounted: {left}")
