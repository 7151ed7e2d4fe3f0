"""HTTP with bounds, for every port that anybody may reach and every answer that anybody may have written.

`server` listens, `connection` bounds what one client may send and leave unread, `reading` reads an answer up to a size.
Used by the gateway, the metrics server and the operator. Knows no resource of Kubernetes.
"""
