"""`python -m conveyor_metrics`: the process of the metrics API. The one broad `except` of it is here."""

import asyncio
import logging
import os
import sys

from conveyor_metrics.server import serve
from conveyor_metrics.settings import parse_settings
from conveyor_process.log import set_up_log
from conveyor_process.settings import SettingsError

logger = logging.getLogger("conveyor_metrics")


def main() -> int:
    """0 after SIGTERM, 1 after an error, 2 for settings that cannot be used."""
    try:
        settings = parse_settings(sys.argv[1:], os.environ)
        set_up_log(settings.log_level, settings.log_format)
        asyncio.run(serve(settings))
    except SettingsError as error:
        print(f"python -m conveyor_metrics: {error}", file=sys.stderr)
        return 2
    except Exception:
        logger.exception("event=failed")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
