"""`kubectl conveyor`: a command-line program that inspects Conveyor in a cluster, with the rights of its user.

Only `migrate` and `tune` write to the cluster, and `tune` restores the service at its end. The program does not contact
the operator, but uses the operator's code for its computations.
"""
