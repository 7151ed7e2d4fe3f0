"""Real clients against a real service: each as its users install it, in an environment of its own.

`matrix` says which, in which version, and what is run; `runner` runs one; `python -m e2e.clients` all of them, on the
local cluster or against any base URL. Nothing of theirs is a dependency of ours.
"""
