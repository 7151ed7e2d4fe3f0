"""Reports from the gateways: which services must start from zero or may scale to zero, and how engines started.

Told to `inferenceservice`, which decides (docs/adr/0031, docs/adr/0045).
"""
