"""`kubectl conveyor`: what a person asks of a cluster that runs Conveyor, from the outside and with their own rights.

Only `tune` writes, and puts back what it wrote. Knows no operator's process; what it computes with is the operator's
own.
"""
