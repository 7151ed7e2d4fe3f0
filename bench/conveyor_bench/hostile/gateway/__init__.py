"""Hostile clients and engines beside the others of a gateway."""
