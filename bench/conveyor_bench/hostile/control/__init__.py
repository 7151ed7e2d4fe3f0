"""A hostile tenant and hostile clients beside the others of operator and metrics server."""
