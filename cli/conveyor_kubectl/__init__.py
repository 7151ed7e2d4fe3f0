"""`kubectl conveyor`: a command-line program that inspects Conveyor in a cluster, with the rights of its user.

Only `tune` writes to the cluster, and restores the service at its end. The program does not contact the operator, but
uses the operator's code for its computations.
"""
