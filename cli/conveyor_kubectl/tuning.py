"""`kubectl conveyor tune`: measures settings, restores the service, and prints the report. Used by `command`."""

import argparse
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from conveyor_api import names
from conveyor_api.quantities import parse_duration_seconds
from conveyor_api.resource import InferenceService
from conveyor_insight.facts import Unanswered
from conveyor_insight.tuning.candidates import Plan, make_plan
from conveyor_insight.tuning.flags import add_flags, as_flag, build_sweep, read_load, report
from conveyor_insight.tuning.interruption import run_interruptible
from conveyor_insight.tuning.load import Calibrated, TestLoad
from conveyor_insight.tuning.progress import Progress
from conveyor_insight.tuning.sweep import Result
from conveyor_kubectl.cluster import Cluster, Refused
from conveyor_kubectl.tuned import Body, Gateway, TunedCopy, TunedService, copy_name, read_service, restore
from conveyor_load.open_loop import Limits, open_session
from conveyor_load.requests import PATHS
from conveyor_load.traces import Trace
from conveyor_operator.kinds import SERVICE

DESCRIPTION = """Measure an InferenceService under load with other batch limits, windows and step budgets, and print the
patch of spec.batching that serves most within an objective. Each setting is a change of the spec, which restarts the
engines. Everything is put back at the end, also after Ctrl-C, SIGTERM and errors."""
EPILOG = """The load comes on top of what the service serves already, and clients wait longer meanwhile. With --replica
a copy of the service with one engine is measured instead. After a tune that was killed, --restore puts back what it
left."""

_FIRST_START_SECONDS: Final = 120.0
_USUAL_TRIALS: Final = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that only this command has."""
    how = parser.add_argument_group("how")
    how.add_argument("--replica", action="store_true", help="measure a copy of the service with one engine")
    how.add_argument("--dry-run", action="store_true", help="print what would be done and how long it takes")
    how.add_argument("--restore", action="store_true", help="only put back what a killed tune has left")
    how.add_argument(
        "--start-timeout", type=as_flag(parse_duration_seconds), default=900.0, metavar="TIME",
        help="how long engines may take to be ready with a setting (default 15m)",
    )  # fmt: skip
    how.add_argument(
        "--url", metavar="URL",
        help="URL of a gateway, such as http://gateway.example; default: through the API server's proxy",
    )  # fmt: skip
    how.add_argument(
        "--system-namespace", metavar="NAME", default=names.SYSTEM_NAMESPACE,
        help="where the gateways are (default %(default)s)",
    )  # fmt: skip
    add_flags(parser, objective_required=False)


@dataclass(frozen=True, slots=True)
class _Job:
    """A tuning job, planned before anything is changed."""

    service: InferenceService
    body: Body
    plan: Plan
    trace: Trace
    flags: argparse.Namespace

    @property
    def start_seconds(self) -> float:
        """Seconds until a setting is in effect, estimated from the latest start of an engine."""
        last = self.service.status.last_start
        one = parse_duration_seconds(last.total) if last is not None and last.total else _FIRST_START_SECONDS
        return one if self.flags.replica else one * (self.service.status.desired_replicas or 1)

    @property
    def most_trials(self) -> int:
        return self.plan.most_candidates * (len(self.flags.rate) or _USUAL_TRIALS)

    def describe(self) -> str:
        """Return a description of the settings to measure and of the time that this takes."""
        flags, name = self.flags, self.service.name
        num_starts = self.plan.most_candidates
        seconds = num_starts * self.start_seconds + self.most_trials * flags.seconds
        rates = ", ".join(f"{rate:g}" for rate in flags.rate) or f"about {_USUAL_TRIALS}, found on the way"
        what = f"a copy of {name}, {copy_name(name)}, with one engine" if flags.replica else f"{name} itself"
        first = "the copy's first start and" if flags.replica else "a rollout for"
        return "\n".join(
            [
                f"measures {what}, first with {self.plan.current}, then with {'; '.join(map(str, self.plan.axes))}",
                f"objectives at P95: {flags.objective}; requests/s: {rates}; {flags.seconds:g} s each",
                f"each setting starts the engines anew: {first} each of {num_starts - 1} settings, "
                + ("then the copy is deleted" if flags.replica else "and one that puts spec.batching back")
                + f"; a start takes about {self.start_seconds:.0f} s",
                f"about {seconds / 60:.0f} minutes in all",
            ]
        )


def tune(cluster: Cluster, flags: argparse.Namespace, show: Callable[[str], None]) -> int:
    """Run the command. Returns the exit code: 1 if no setting meets the objectives. Raises Unanswered."""
    namespace = flags.namespace or cluster.namespace
    if flags.restore:
        show("\n".join(restore(cluster, namespace, flags.name)))
        return 0
    if flags.objective is None:
        raise Unanswered("--objective is missing: for example --objective ttft=500ms,itl=40ms")
    job = _prepare(cluster, namespace, flags)
    _check_rights(cluster, flags)
    if flags.dry_run:
        show(job.describe())
        return 0
    progress = Progress(job.most_trials)
    for line in job.describe().splitlines():
        progress.say(line)
    return run_interruptible(_run(cluster, job, progress, show), progress.say)


def _prepare(cluster: Cluster, namespace: str, flags: argparse.Namespace) -> _Job:
    service, body = read_service(cluster, namespace, flags.name)
    _check_tunable(service, flags)
    try:
        size = service.batching.chosen_batch_size
        batching = service.spec.batching.model_copy(update={"max_batch_size": size})
        plan = make_plan(batching, service.task, flags.max_batch_size, flags.window, flags.max_batch_tokens)
        trace = read_load(flags, service.task or "Generate", service.max_model_len)
    except (OSError, ValueError) as error:
        raise Unanswered(f"no tune: {error}") from error
    return _Job(service, body, plan, trace, flags)


def _check_tunable(service: InferenceService, flags: argparse.Namespace) -> None:
    autoscaling, name = service.spec.autoscaling, service.name
    if (service.task or "Generate") not in PATHS:
        raise Unanswered(f"{name} has task {service.task}, and a tune sends texts: {', '.join(PATHS)}")
    if flags.replica:
        return
    if autoscaling is not None and autoscaling.min_replicas != autoscaling.max_replicas:
        raise Unanswered(
            f"{name} is autoscaled: the load would change its replicas, and so what is measured. "
            "Use --replica, which measures a copy with one engine"
        )
    if not service.status.ready_replicas:
        raise Unanswered(f"no engine of {name} is ready, so there is nothing to measure; --replica starts one")


def _check_rights(cluster: Cluster, flags: argparse.Namespace) -> None:
    """Raise Unanswered if the user may not send requests, before anything is changed or a GPU is used."""
    if flags.url is not None:
        return
    namespace = flags.system_namespace
    try:
        name = cluster.find_proxied_name(namespace, names.GATEWAY_SERVICE)
        may_send = cluster.may("create", SERVICE, namespace, name, "proxy")
    except Refused as error:
        if error.status != 403:
            raise
        may_send = False
    if not may_send:
        raise Unanswered(
            f"you may not read the Service {names.GATEWAY_SERVICE} in {namespace} and create its services/proxy, by "
            "which requests would be sent: ask for a Role with these rights, or run in a pod with "
            f"--url http://{names.GATEWAY_SERVICE}.{namespace} (https if the gateway serves TLS)"
        )


def _find_gateway(cluster: Cluster, flags: argparse.Namespace) -> tuple[Gateway, ssl.SSLContext | None, str | None]:
    """Return the gateway, and the TLS context and HTTP proxy that lead to it."""
    if flags.url is not None:
        return Gateway(flags.url.rstrip("/")), None, None
    name = cluster.find_proxied_name(flags.system_namespace, names.GATEWAY_SERVICE)
    url = cluster.find_service_url(flags.system_namespace, name)
    return Gateway(url, cluster.build_headers), cluster.build_tls(), cluster.proxy


async def _run(cluster: Cluster, job: _Job, progress: Progress, show: Callable[[str], None]) -> int:
    flags, results, is_whole = job.flags, list[Result](), False
    kind = TunedCopy if flags.replica else TunedService
    try:
        gateway, tls, proxy = _find_gateway(cluster, flags)
        async with open_session(Limits(), tls, proxy) as session:
            load = TestLoad(job.trace, flags.seconds, flags.seed, flags.objective, session, progress)
            sweep = build_sweep(flags, job.trace, load.measure)
            async with kind(cluster, job.body, job.plan, gateway, flags.start_timeout, progress.say) as tuned:
                await sweep.go(Calibrated(tuned, session), job.plan, results)
        is_whole = True
    finally:
        progress.clear()
        if results:
            show(report(results, job.plan, flags, is_whole=is_whole))
    return 0 if any(result.best for result in results) else 1
