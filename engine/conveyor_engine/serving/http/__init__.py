"""The HTTP server: OpenAI's routes, probes and metrics, which use an EngineClient. Does not import torch."""
