"""Runs real clients with a real service. Each client is installed as its users do, in its own environment.

`matrix` says which, in which version, and what is run; `runner` runs one; `python -m e2e.clients` all of them, on the
local cluster or against any base URL. Nothing of theirs is a dependency of ours.
"""
