"""Runs a command as a newcomer would: in a bare Debian that has the README's prerequisites, on a fresh clone of HEAD.

`python3 -m e2e.fresh COMMAND...` (`make fresh`), as root. `root` makes the Debian; `enter.sh` moves into it, in mount
and process namespaces of its own, and ends with everything that was started there. It gets what this machine has built
only by name (LEND="tools uv images"). Standard library only.
"""
