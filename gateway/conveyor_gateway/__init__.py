"""The gateway: the OpenAI-compatible door, with a bounded queue per InferenceService and late binding to engines.

One request, file by file: `listener` (HTTP) -> `app` -> `routing` (which service?) -> `gateway` (its life) -> `bodies`,
`memory` -> `queues`, `admission` (its turn) -> `dispatch` (which engine?) -> `proxy`, `engine_connection` (bytes there
and back) -> `relay` (to the client) -> `record`.
One change in the cluster: `watch` -> `catalog`, `slices` -> `queues`. Around both: `settings`, `server`, `readiness`,
`demand`, `metrics`, `answers`, `service_status`, `engine_pages`, `errors`.
"""

__version__ = "0.1.0"  # the image has the package's files, not its metadata
