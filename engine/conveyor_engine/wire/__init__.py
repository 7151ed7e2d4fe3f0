"""What the processes of the engine say to each other: API, engine and workers. Plain data."""
