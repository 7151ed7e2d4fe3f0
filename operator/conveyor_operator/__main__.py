"""`python -m conveyor_operator`: reads settings, sets up the log, runs `process`. Start reading here.

Kopf and the client library take seconds to import, so that happens after the flags were found to be right.
"""

import asyncio
import logging
import signal
import sys

from conveyor_api.log import set_up_log
from conveyor_operator.settings import Settings, parse_settings

logger = logging.getLogger("conveyor_operator")


def main() -> None:
    """Returns after SIGTERM or SIGINT; an exception, so code 1, when it cannot go on and wants to be restarted."""
    settings = parse_settings(sys.argv[1:])
    set_up_log(settings.log_level)
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # one line per handler call otherwise
    asyncio.run(_run(settings))


async def _run(settings: Settings) -> None:
    from conveyor_operator.process import run_operator

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Kopf takes them over later; until then, for instance while the CRD is missing, they are ours.
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await run_operator(settings, stop)
    logger.info("stopped")


if __name__ == "__main__":
    main()
