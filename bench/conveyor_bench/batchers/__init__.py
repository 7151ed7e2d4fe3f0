"""Dynamic batchers over HTTP: this engine and its peers, with one model, the same texts and the same rates.

A file `serve_*.py` is a server as its users write it, with an environment of its own: its head names the packages,
which uv installs once and caches. Its arguments: MODEL PORT BATCH WINDOW_SECONDS.
"""
