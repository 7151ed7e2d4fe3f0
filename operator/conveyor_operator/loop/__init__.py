"""The reconcile loop, from Kopf's watches to applied children and status, for any kind of resource.

The loop does not know Conveyor's resources. Each has a separate package that implements `resource.Resource`.
"""
