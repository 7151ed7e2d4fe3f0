"""Pages that the gateway serves itself, without a place on an engine."""
