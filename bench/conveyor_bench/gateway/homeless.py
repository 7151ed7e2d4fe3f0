"""The gateway without homes for prefixes: `python -m conveyor_bench.gateway.homeless`. For `prefixes` only.

Each request goes to the least loaded engine.
"""

import sys

from conveyor_gateway.__main__ import main
from conveyor_gateway.admission.service_queue import ServiceQueue

if __name__ == "__main__":
    ServiceQueue.has_homes = False  # type: ignore[assignment, method-assign]
    sys.exit(main())
