"""How the operator, the gateway and the metrics server log: lines of `key=value` to standard error, times in UTC."""

import logging
import time


def set_up_log(level: str) -> None:
    """Once, by `__main__`."""
    logging.Formatter.converter = time.gmtime
    logging.basicConfig(
        level=level,
        format="time=%(asctime)s.%(msecs)03dZ level=%(levelname)s logger=%(name)s %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
