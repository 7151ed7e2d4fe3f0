"""The gateway without the reading of request bodies: `python -m conveyor_bench.gateway.unread`. For `beside` only.

At a service's own path, the gateway reads `priority` and the limits on the answer's tokens. Nothing else of a body is
read there.
"""

import sys

from conveyor_gateway.__main__ import main
from conveyor_gateway.relaying import priority
from conveyor_gateway.relaying.bodies import OrderFields

_UNREAD = OrderFields()

if __name__ == "__main__":
    priority.read_order_fields = lambda body: _UNREAD  # type: ignore[attr-defined]
    sys.exit(main())
