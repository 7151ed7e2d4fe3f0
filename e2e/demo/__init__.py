"""Demonstrates an InferenceService: one chat, and a burst whose queue scales the service from 1 to 3 and back to 1.

`python -m e2e.demo`; `make demo` brings up all that it needs. `__main__` conducts, `story` remembers what was seen,
`screen` shows it. `tasks` has a shorter demo for each task that takes one step. Leaves the cluster and the service up.
"""
