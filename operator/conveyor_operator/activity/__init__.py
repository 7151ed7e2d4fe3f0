"""Reports from the gateways: which services must start from zero or may scale to zero, and how engines started.

`inferenceservice` uses them for its decisions (docs/adr/0031, docs/adr/0045).
"""
