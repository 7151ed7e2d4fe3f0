"""Other systems that `engine --compare` measures. Called by `engine.command`.

A file `run_*.py` is a script with an environment of its own: its head names the packages, which uv installs once and
caches. Neither the project's extras nor its lock contain them.
"""
