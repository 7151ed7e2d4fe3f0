"""The InferenceService: its models, names, labels, defaults and conditions. Types only: no I/O, no process.

Imported by operator, gateway and metrics server. The models are the one source of the CRD and of the API reference
(`crds/generate.py`).
"""
