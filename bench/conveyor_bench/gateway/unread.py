"""The gateway without the reading of request bodies: `python -m conveyor_bench.gateway.unread`. For `beside` only.

At a service's own path, the gateway reads `priority` and the limits on the answer's tokens. Nothing else of a body is
read there.
"""

import sys

from conveyor_gateway.__main__ import main
from conveyor_gateway.relaying import request_life
from conveyor_gateway.relaying.bodies import NO_FIELDS

if __name__ == "__main__":
    request_life.read_queue_fields = lambda body: NO_FIELDS  # type: ignore[attr-defined]
    sys.exit(main())
