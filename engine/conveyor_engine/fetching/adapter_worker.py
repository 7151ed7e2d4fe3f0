"""A program that fetches adapters one after another. Started by `serving.adapter_downloads`.

Each line of standard input is a JSON object with `uri`, `target` and `adapter`, as for the command `fetch`. Each line
of standard output is the answer to one: `{}`, or the `reason` and the `message` of its error.
"""

import json
import os
import sys
from typing import TextIO

from conveyor_engine.errors import StartError, explain_crash
from conveyor_engine.fetching.fetch import fetch
from conveyor_engine.logs import configure_logging


def main(requests: TextIO, answers: TextIO) -> None:
    """Fetch what the lines name, until they end."""
    for line in requests:
        answers.write(json.dumps(_fetch(**json.loads(line))) + "\n")
        answers.flush()


def _fetch(uri: str, target: str, adapter: str) -> dict[str, str]:
    try:
        fetch(uri, target, adapter)
    except StartError as error:
        return {"reason": error.reason, "message": str(error)}
    except Exception as error:
        reason, why = explain_crash(error)
        return {"reason": reason, "message": f"adapter {adapter}: {why}"}
    return {}


if __name__ == "__main__":
    configure_logging()
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries may print
        main(sys.stdin, answers)
