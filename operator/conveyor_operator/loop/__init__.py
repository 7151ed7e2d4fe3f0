"""The loop: from what Kopf watches to a resource that is as its spec says, for any kind of resource.

Knows no resource of ours: each has a room of its own, and is known here as a `resource.Resource`.
"""
