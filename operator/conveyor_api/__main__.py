"""`python -m conveyor_api`: print or write what is generated from the models. Called by `make generate` and by CI."""

import argparse
import sys
from pathlib import Path

from conveyor_api.generate import render_crd, stale_files, write_files
from conveyor_api.reference import build_reference


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 1 when `--check` finds stale files."""
    options = _parser().parse_args(arguments)
    if options.command == "generate":
        for path in write_files(options.root):
            print(f"wrote {path}")
        return 0
    if options.command == "crd" and options.check:
        return _check(options.root)
    print(render_crd() if options.command == "crd" else build_reference(), end="")
    return 0


def _check(root: Path) -> int:
    stale = stale_files(root)
    for path in stale:
        print(f"{path} is not what the models say: run `make generate` and commit it", file=sys.stderr)
    return 1 if stale else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m conveyor_api", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    crd = commands.add_parser("crd", help="print the CustomResourceDefinition")
    crd.add_argument("--check", action="store_true", help="print nothing; exit 1 if a committed file is stale")
    commands.add_parser("docs", help="print the API reference")
    generate = commands.add_parser("generate", help="write crds/, the chart's copy and docs/api-reference.md")
    for command in (crd, generate):
        command.add_argument("--root", type=Path, default=Path.cwd(), help="the repository (default: here)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
