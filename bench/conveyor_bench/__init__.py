"""Measurements of Conveyor's parts, alone and beside others. No image and no wheel contains this package."""
