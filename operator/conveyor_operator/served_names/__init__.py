"""The names at the gateway's root: which namespace has each, claimed for good (docs/adr/0055).

Told to `inferenceservice`, which writes it into the status.
"""
