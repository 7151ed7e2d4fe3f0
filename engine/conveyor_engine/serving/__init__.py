"""The API process: HTTP in front, the engine process behind. No torch."""
