"""Collects from the gateways what callers use, and keeps it in one bounded object."""
