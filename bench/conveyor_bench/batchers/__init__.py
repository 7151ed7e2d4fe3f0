"""Compares dynamic batchers over HTTP: this engine and its peers, with one model, the same texts and the same rates.

Each file `serve_*.py` is a peer's server, written as its users would write it. The server has its own environment: the
head of the file names the packages, which uv installs once and caches. Its arguments are MODEL PORT BATCH
WINDOW_SECONDS.
"""
