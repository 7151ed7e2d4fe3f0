"""Measures how hostile clients and engines affect other users of a gateway."""
