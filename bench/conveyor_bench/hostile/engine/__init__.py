"""A hostile client beside the others of one engine."""
