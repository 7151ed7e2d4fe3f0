"""Measures the engine, alone and beside others."""
