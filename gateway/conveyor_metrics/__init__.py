"""The custom.metrics.k8s.io server: how many requests each InferenceService holds, for the HorizontalPodAutoscaler.

The life of one question, file by file: `app` takes it from the API server, `auth` checks who brings it,
`source` asks every gateway, `documents` shapes the answer. Around it: `settings`, `certificates`, `watch`, `server`.
It never caches, guesses, or says 0 when it does not know.
"""
