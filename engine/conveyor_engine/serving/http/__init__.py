"""The HTTP edge: OpenAI's routes, probes and metrics over an EngineClient. Free of torch."""
