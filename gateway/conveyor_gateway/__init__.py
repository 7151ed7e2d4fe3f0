"""The gateway: the OpenAI-compatible door, with a bounded queue per InferenceService and late binding to engines."""
