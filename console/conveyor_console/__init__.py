"""The console: web pages that show the state of InferenceServices. It only reads.

Watches pass InferenceServices to `services` and the gateways' addresses to `gateways`, which reads the gateways' pages
every few seconds. `overview` joins both to lines, `pages` renders them, and `app` serves them. `access` decides which
namespaces a caller sees, by the caller's rights in Kubernetes. `server` builds and runs all of them.
"""
