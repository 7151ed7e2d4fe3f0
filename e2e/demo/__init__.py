"""The main job, shown: an InferenceService, one chat, a burst, and the service going 1 -> 3 -> 1 because of its queue.

`python -m e2e.demo`; `make demo` brings up all that it needs. `__main__` conducts, `story` remembers what was seen,
`screen` shows it. Leaves the cluster and the service up.
"""
