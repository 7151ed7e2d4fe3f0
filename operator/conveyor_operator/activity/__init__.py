"""What the gateways say of services that may go to zero: who has to be woken, and who may go to sleep.

Told to `inferenceservice`, which decides (docs/adr/0031).
"""
