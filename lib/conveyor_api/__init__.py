"""Defines the InferenceService: its models, names, labels, defaults and conditions. Types only: no I/O, no process.

Imported by operator, gateway and metrics server. `crds/generate.py` generates the CRD and the API reference from these
models.
"""
