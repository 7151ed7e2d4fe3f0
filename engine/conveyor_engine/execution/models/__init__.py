"""Loads transformers models into the engine, and rejects models that it would run wrongly."""
