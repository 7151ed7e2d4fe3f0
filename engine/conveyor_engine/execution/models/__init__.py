"""Loading transformers models into the engine, and refusing those it would run wrongly."""
