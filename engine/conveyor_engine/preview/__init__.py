"""Says from a model's small files alone whether this engine runs it, and how much memory that takes."""
