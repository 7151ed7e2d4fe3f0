"""`python -m e2e.hub --root DIR [--port N]`: the local hub until SIGTERM. The first line tells its address."""

import argparse
import signal
import sys
import threading
from pathlib import Path

from e2e.hub.server import Faults, Hub


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m e2e.hub", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of <organisation>/<name>/<files>")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 = any free one")
    parser.add_argument("--token", help="ask for this bearer token")
    parser.add_argument("--corrupt", action="append", default=[], metavar="FILE", help="serve it with a wrong bit")
    parser.add_argument("--gate", action="append", default=[], metavar="REPOSITORY", help="answer that it is gated")
    parser.add_argument("--bytes-per-second", type=float, help="send files no faster")
    flags = parser.parse_args()
    faults = Faults(frozenset(flags.corrupt), flags.bytes_per_second, frozenset(flags.gate))
    hub = Hub((flags.host, flags.port), flags.root, flags.token, faults)
    # shutdown() waits for the serving loop, so the handler must not run it in the loop's own thread
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=hub.shutdown).start())
    print(f"event=listening url={hub.url}", flush=True)
    hub.serve_forever(poll_interval=0.1)
    hub.server_close()
    sys.exit(0)


if __name__ == "__main__":
    main()
