"""The gateway: the OpenAI-compatible door, with a bounded queue per InferenceService and late binding to engines.

One request, room by room: `listening` (HTTP) -> `routing` (which service?) -> `relaying` (its life) -> `capacity` (room
for its bytes) -> `admission` (its turn, and on which engine) -> `engines` (bytes there and back) -> `relaying` (to the
client) -> `recording`; what needs no engine's place goes from `routing` to `pages`.
One change in the cluster: `watching` -> `admission`. Around both: `server`, `settings`, `responses`, `errors`.
"""

__version__ = "0.1.0"  # the image has the package's files, not its metadata
