"""Load for a service and what it measures: traces, requests, an open loop, figures against objectives.

Shared by `kubectl conveyor tune` and `python -m conveyor_bench tune`. Speaks OpenAI's API over HTTP and knows no
cluster and no engine.
"""
