"""The gateway: an OpenAI-compatible proxy with a bounded queue for each InferenceService and late binding to engines.

A request passes these packages: `listening` (HTTP) -> `routing` (finds the service) -> `relaying` (runs the request) ->
`capacity` (reserves memory) -> `admission` (queues it and chooses the engine) -> `engines` (exchanges bytes with the
engine) -> `relaying` (responds to the client) -> `recording`. Requests that need no place on an engine go from
`routing` to `pages`. A change in the cluster passes `watching` -> `admission`. All packages use `settings`, `responses`
and `errors`; `server` builds and runs them.

A place is room for one request on one engine. Each engine has a limited number of places.
"""

__version__ = "0.1.0"  # a constant, because the image has the package's files without its metadata
