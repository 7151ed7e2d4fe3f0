"""Defines the engine's configuration: its fields and its sources."""
