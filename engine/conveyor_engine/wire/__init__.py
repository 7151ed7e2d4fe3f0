"""Messages between the engine's processes: the API process, the engine process and the workers. Plain data."""
