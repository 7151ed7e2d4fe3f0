"""Conveyor's metrics API in the cluster: its serving certificate, and its registration as custom.metrics.k8s.io.

`keeper` conducts, and `following` tells it what is there; `registrar` writes the APIServices; `certificates` and
`registration` decide, without I/O; `server` asks what the metrics server shows; `answer` is what others are told.
"""
