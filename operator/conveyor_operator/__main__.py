"""`python -m conveyor_operator`: reads settings, sets up the log, runs `process`. Start reading here.

Kopf and the client library take seconds to import, so that happens after the flags were found to be right.
"""

import asyncio
import logging
import os
import signal
import sys

from conveyor_operator.settings import Settings, parse_settings
from conveyor_process.log import set_up_log
from conveyor_process.settings import SettingsError

logger = logging.getLogger("conveyor_operator")


def main() -> int:
    """0 after SIGTERM or SIGINT, 2 for settings that cannot be used; raises, so code 1, what ends it otherwise."""
    try:
        settings = parse_settings(sys.argv[1:], os.environ)
        set_up_log(settings.log_level, settings.log_format)
        logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # one line per handler call otherwise
        asyncio.run(_run(settings))
    except SettingsError as error:
        print(f"python -m conveyor_operator: {error}", file=sys.stderr)
        return 2
    return 0


async def _run(settings: Settings) -> None:
    from conveyor_operator.process import run_operator

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Kopf takes them over later; until then, for instance while the CRD is missing, they are ours.
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await run_operator(settings, stop)
    logger.info("event=stopped")


if __name__ == "__main__":
    sys.exit(main())
