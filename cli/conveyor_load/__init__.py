"""Sends load to a service and measures it: traces, requests, an open loop, and figures with objectives.

Shared by `kubectl conveyor tune` and `python -m conveyor_bench tune`. The package uses OpenAI's API over HTTP, and
depends on neither a cluster nor an engine.
"""
