"""`python -m e2e.demo_model [NAME] [--out DIR]`: train a model, or find it in the cache, and print its folder."""

import argparse
from pathlib import Path

from e2e.demo_model import DEMO, SOURCES, demo_model_directory, make


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m e2e.demo_model", description=__doc__)
    parser.add_argument("name", nargs="?", choices=SOURCES, default=DEMO)
    parser.add_argument("--out", type=Path, metavar="DIR", help="train anew into DIR (default: the cache folder)")
    flags = parser.parse_args()
    out: Path | None = flags.out
    if out is None:
        out = demo_model_directory(flags.name)
    else:
        make(out.absolute(), flags.name)
    print(out)


if __name__ == "__main__":
    main()
