"""The engine's configuration: its fields, and where they come from."""
