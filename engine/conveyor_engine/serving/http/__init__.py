"""The HTTP side: OpenAI's routes, probes and metrics over an EngineClient. Free of torch."""
