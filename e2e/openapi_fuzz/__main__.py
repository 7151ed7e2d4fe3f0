"""`python -m e2e.openapi_fuzz [MODEL...]`: send generated requests to each route. Called by `make openapi-fuzz`.

Progress goes to standard error, one line for each route, and a table at the end. Standard output has one line of JSON.
The exit code is 1 if anything was found. `build/openapi-fuzz` has schemathesis' logs, with a curl command for each
finding.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from e2e.cluster.paths import REPOSITORY
from e2e.openapi_fuzz.documents import (
    Route,
    add_examples,
    find_answered,
    find_path_parameters,
    find_routes,
    read_document,
    simplify,
)
from e2e.openapi_fuzz.engines import Door, started
from e2e.openapi_fuzz.models import MODELS, REQUEST_SECONDS_MAX
from e2e.openapi_fuzz.tool import CHECKS, OWN_CHECKS, Result, Tool, install

OUT = REPOSITORY / "build" / "openapi-fuzz"
FEWER = 100  # routes that an engine does not answer, or that an earlier one has answered, get 1/FEWER of the cases


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.openapi_fuzz", description=__doc__)
    parser.add_argument("model", nargs="*", metavar="MODEL", help=f"models to run: {', '.join(MODELS)} (default: all)")
    parser.add_argument("--cases", type=int, default=5000, metavar="N", help="cases for each route (default: 5000)")
    parser.add_argument("--route", action="append", metavar="PATH", help="only this path; may be repeated")
    parser.add_argument("--gateway", action="store_true", help="send requests with a key through the gateway")
    parser.add_argument("--document", type=Path, metavar="FILE", help="another API's document (JSON or YAML)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="routes at a time (default: one a core)")
    parser.add_argument("--route-seconds-max", type=float, default=3600.0, help="longest time of a route")
    flags = parser.parse_args()
    if unknown := set(flags.model) - MODELS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    begin, program = time.monotonic(), install()
    results: list[Result] = []
    tested: set[Route] = set()
    unserved: set[str] = set()
    for model in flags.model or MODELS:
        with started(model, with_gateway=flags.gateway) as door:
            for result in _test(door, model, program, flags, tested, unserved):
                _report_result(result)
                results.append(result)
    _report_table(results)
    missing = sorted(unserved - {str(route) for route in tested})
    print(json.dumps(_sum(results) | {"seconds": round(time.monotonic() - begin), "not_served": missing}))
    return 1 if any(result.failures for result in results) else 0


def _test(
    door: Door,
    model: str,
    program: Path,
    flags: argparse.Namespace,
    tested: set[Route],
    unserved: set[str],
) -> Iterator[Result]:
    """Test all routes of one engine. Adds those it answers to `tested`; with `--document`, the others to `unserved`."""
    own: dict[str, Any] = door.http.get("/openapi.json").json()
    document = simplify(own) if flags.document is None else read_document(flags.document)
    known = {route.pattern for route in find_routes(own)}
    routes = [route for route in find_routes(document) if route.pattern in known]
    answered = set(find_answered(door.http, model, routes))
    if flags.document is not None:
        unserved |= {str(route) for route in find_routes(document) if route not in answered}
        routes = [route for route in routes if route in answered]
    folder = OUT / model
    folder.mkdir(parents=True, exist_ok=True)
    values = {name: _values(name, model) for name in find_path_parameters(document)}
    add_examples(document, values)
    checks = OWN_CHECKS if flags.document is None else CHECKS
    tool = Tool(
        program, model, door.url, door.http.headers.get("authorization"), document, folder, checks,
        2 * REQUEST_SECONDS_MAX, flags.route_seconds_max,
    )  # fmt: skip
    # The Open Inference Protocol's document has no status for a model that does not exist.
    tool.configure(values, 0.8 if flags.document is None else 1.0)
    chosen = [route for route in routes if not flags.route or route.path in flags.route]
    with ThreadPoolExecutor(flags.workers) as pool:
        new = [route for route in chosen if route in answered and route not in tested]
        others = [route for route in chosen if route not in new]
        runs = [pool.submit(tool.run, route, flags.cases) for route in new if route.method == "POST"]
        if bodiless := [route for route in new if route.method != "POST"]:
            runs.append(pool.submit(tool.run_without_bodies, bodiless, flags.cases))
        if others:
            runs.append(pool.submit(tool.run_briefly, others, max(1, flags.cases // FEWER)))
        for run in runs:
            result = run.result()
            if not door.is_ready():
                result.failures.append("the service is not ready any more")
            yield result
    tested |= set(new)
    (folder / "engine.log").write_text(door.read_log())


def _values(parameter: str, model: str) -> list[str]:
    """Return the valid values of a path parameter. Schemathesis adds others."""
    return ["1"] if "version" in parameter.lower() else [model]


def _sum(results: list[Result]) -> dict[str, Any]:
    return {
        "cases": sum(result.cases for result in results),
        "failures": sum(len(result.failures) for result in results),
        "results": [result.as_json() for result in results],
    }


def _report_result(result: Result) -> None:
    found = "; ".join(result.failures) or "nothing"
    _report(f"{result.engine}: {result.route}: {result.cases} cases in {result.seconds:g} s, found {found}")


def _report_table(results: list[Result]) -> None:
    _report("\n| engine | route | cases | seconds | found |\n| --- | --- | --- | --- | --- |")
    for each in results:
        found = "; ".join(each.failures) or "–"
        _report(f"| {each.engine} | `{each.route}` | {each.cases} | {each.seconds:g} | {found} |")


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
