"""Systems that `bench --compare` runs in processes and environments of their own. Called by `command`.

A file `run_*.py` is a script of such an environment: its head names the packages, which uv installs once and caches.
Neither the project's extras nor its lock know them.
"""
