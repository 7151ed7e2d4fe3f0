"""Measures how a hostile tenant and hostile clients affect other users of operator and metrics server."""
