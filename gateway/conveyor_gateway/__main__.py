"""`python -m conveyor_gateway`: the gateway's process. The one broad `except` of it is here."""

import asyncio
import logging
import os
import sys

import uvloop

from conveyor_gateway.server import serve
from conveyor_gateway.settings import parse_settings
from conveyor_process.log import set_up_log
from conveyor_process.settings import SettingsError

logger = logging.getLogger("conveyor_gateway")


def main() -> int:
    """0 after SIGTERM, 1 after an error, 2 for settings that cannot be used."""
    try:
        settings = parse_settings(sys.argv[1:], os.environ)
        set_up_log(settings.log_level, settings.log_format)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))
    except SettingsError as error:
        print(f"python -m conveyor_gateway: {error}", file=sys.stderr)
        return 2
    except Exception:
        logger.exception("event=failed")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
