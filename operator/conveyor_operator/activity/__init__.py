"""Reads from the gateways which services must start from zero or may scale to zero, and how long warm-ups took.

`inferenceservice` uses the results for its decisions (docs/adr/0031, docs/adr/0045).
"""
