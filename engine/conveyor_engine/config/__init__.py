"""The engine's configuration: its fields and its sources."""
