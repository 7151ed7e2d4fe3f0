"""The main job, shown: an InferenceService, one chat, a burst, and the service going 1 -> 3 -> 1 because of its queue.

`python -m e2e.demo`; `make demo` brings up all that it needs. `__main__` conducts, `story` remembers what was seen,
`screen` shows it. `tasks` has a shorter demo for each task that takes one step. Leaves the cluster and the service up.
"""
