"""What the gateways say: who of those that may go to zero has to be woken or may go to sleep, and how engines started.

Told to `inferenceservice`, which decides (docs/adr/0031, docs/adr/0045).
"""
