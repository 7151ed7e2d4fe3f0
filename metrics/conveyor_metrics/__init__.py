"""The custom.metrics.k8s.io server: how many requests each InferenceService holds, for the HorizontalPodAutoscaler.

A query passes `listener` (HTTPS) -> `app` -> `auth` (authenticates the caller) -> `source` (reads every gateway) ->
`documents` (builds the response). A change in the cluster passes `conveyor_kube.watch` -> `watched_list` -> `source`,
or `auth` -> `certificates`. All use `settings` and `errors`; `server` builds and runs them.

The server does not cache or guess values. If a value is unknown, the server returns an error, not 0.
"""
