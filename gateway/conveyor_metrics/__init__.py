"""The custom.metrics.k8s.io server: how many requests each InferenceService holds, for the HorizontalPodAutoscaler.

One question, file by file: `listener` (HTTPS) -> `app` -> `auth` (who brings it?) -> `source` (every gateway is asked)
-> `documents` (the answer). One change in the cluster: `conveyor_kube.watch` -> `watched_list` -> `source`, or
`auth` -> `certificates`. Around both: `settings`, `server`, `errors`.
It never caches, guesses, or says 0 when it does not know.
"""
