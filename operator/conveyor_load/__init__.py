"""Sends load to a service and measures it: traces, requests, an open loop, and figures with objectives.

Shared by `kubectl conveyor tune` and `python -m conveyor_bench tune`. It uses OpenAI's API over HTTP, and knows neither
clusters nor engines.
"""
