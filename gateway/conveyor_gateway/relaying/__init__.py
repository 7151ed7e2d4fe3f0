"""The life of a request for an engine: body, queue, engine, answer."""
