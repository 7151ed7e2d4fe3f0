"""`python -m e2e.demo_model [--out DIR]`: train the demo model, or find it in the cache; prints the folder."""

import argparse
from pathlib import Path

from e2e.demo_model import demo_model_directory, make


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m e2e.demo_model", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="DIR", help="train anew into DIR (default: the cache folder)")
    out: Path | None = parser.parse_args().out
    if out is None:
        out = demo_model_directory()
    else:
        make(out.absolute())
    print(out)


if __name__ == "__main__":
    main()
