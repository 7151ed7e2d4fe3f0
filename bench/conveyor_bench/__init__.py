"""Benchmarks of Conveyor's parts, alone and in comparison with other software. Not part of any image or wheel."""
