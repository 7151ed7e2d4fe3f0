"""Conveyor's metrics API in the cluster: its serving certificate, and its registration as custom.metrics.k8s.io.

`keeper` watches and conducts; `registrar` writes the APIServices; `certificates` and `registration` decide, without
I/O; `server` asks what the metrics server shows.
"""
