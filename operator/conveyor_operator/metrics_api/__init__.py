"""Conveyor's metrics API in the cluster: its serving certificate, and its registration as custom.metrics.k8s.io.

`keeper` calls the other modules. `following` reports the observed objects, `registrar` writes the APIServices,
`certificates` and `registration` make decisions without I/O, `server` probes the metrics server, and `answer` is the
result for other parts of the operator.
"""
