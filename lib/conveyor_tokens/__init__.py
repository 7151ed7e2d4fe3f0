"""Verifies tokens of ServiceAccounts offline, with the keys that a cluster publishes.

Used by the gateway and the engine. Needs only PyJWT.
"""
