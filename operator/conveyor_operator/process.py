"""Builds the operator's parts, waits for the CRDs, and runs Kopf until the process is told to stop.

`__main__` calls `run_operator`, and tests call it in a thread. Only this module connects the parts with each other.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, cast

import kopf

from conveyor_kube.issuer import Issuer
from conveyor_kube.kubeconfig import load_configuration
from conveyor_operator.activity.adapter_states import AdapterStates, Counts
from conveyor_operator.activity.answer import Activity
from conveyor_operator.activity.follower import ActivityFollower
from conveyor_operator.activity.warm_ups import ReportWarmUp, WarmUps
from conveyor_operator.cluster import Cluster, wait_for
from conveyor_operator.election import Election
from conveyor_operator.health import Health, HealthServer
from conveyor_operator.inferenceservice.kinds import INFERENCE_SERVICE
from conveyor_operator.inferenceservice.observed import list_held_pods
from conveyor_operator.inferenceservice.resource import InferenceServices, Sources
from conveyor_operator.kinds import SERVED_NAME, Key, ObjectKind
from conveyor_operator.loop.handlers import build_registry, configure
from conveyor_operator.loop.optional import OptionalKinds
from conveyor_operator.loop.reconcile import Reconciler
from conveyor_operator.loop.resource import Resource, watched_kinds
from conveyor_operator.loop.session import KopfSession
from conveyor_operator.loop.store import Store
from conveyor_operator.loop.watches import Watches
from conveyor_operator.loop.workers import Workers
from conveyor_operator.metrics import Metrics
from conveyor_operator.metrics_api.answer import MetricsApi
from conveyor_operator.metrics_api.keeper import MetricsApiKeeper
from conveyor_operator.published_keys import PublishedKeys
from conveyor_operator.served_names.answer import NameAnswer
from conveyor_operator.served_names.keeper import ServedNames
from conveyor_operator.settings import Settings
from conveyor_operator.usage.held_pods import HeldPod
from conveyor_operator.usage.keeper import UsageKeeper
from conveyor_operator.usage.key_status import KeyStatusKeeper
from conveyor_process.spans import build_tracer

if TYPE_CHECKING:
    from conveyor_process.otlp import Tracer

logger = logging.getLogger(__name__)

_CRD_POLL_SECONDS = 2.0


def build_resources(settings: Settings, metrics: Metrics, sources: Sources) -> tuple[Resource, ...]:
    """Return every kind of resource that the operator reconciles."""
    return (InferenceServices(settings, metrics, sources),)


class Operator:
    """The parts of one process, and the `Sources` of its resources."""

    def __init__(self, settings: Settings, cluster: Cluster, metrics: Metrics, tracer: "Tracer | None" = None) -> None:
        """tracer: None if traces are not exported."""
        self.settings = settings
        self.cluster = cluster
        self.metrics = metrics
        self.store = Store()
        self.keeper = MetricsApiKeeper(
            cluster, metrics, settings.system_namespace, settings.cluster_domain, self._mark_all
        )
        self.activity = ActivityFollower(cluster.client, settings.system_namespace, metrics, self._mark_service)
        self._knows_all = False
        gateways, pods = (lambda: self.activity.gateways), self._list_held_pods
        self.usage = UsageKeeper(cluster, metrics, settings.system_namespace, gateways, pods)
        self.key_statuses = KeyStatusKeeper(cluster, gateways)
        self.warm_ups = WarmUps(gateways, self._mark_service)
        namespaces, system_namespace = settings.watch_namespaces, settings.system_namespace
        self.adapter_states = AdapterStates(gateways, self._mark_service)
        expire_seconds = settings.unserved_name_seconds
        self.served_names = ServedNames(cluster, namespaces, system_namespace, self._mark_service, expire_seconds)
        self.published_keys = PublishedKeys(cluster.client, self._mark_all)
        self.store.follow(INFERENCE_SERVICE, self.served_names.see)
        self.store.follow(INFERENCE_SERVICE, self._drop_series)
        self.resources: Sequence[Resource] = build_resources(settings, metrics, self)
        reconcile = Reconciler(self.resources, cluster, self.store).reconcile
        self.workers = Workers(reconcile, metrics, settings.workers, tracer)
        self.watches = Watches(self.resources, self.store, metrics, self.workers.mark)
        self.optional = OptionalKinds(cluster, self.resources, self.watches, settings.watch_namespaces, self._mark_all)
        self.health = Health(self.workers.longest_run_seconds)

    def read_metrics_api(self) -> MetricsApi:
        return self.keeper.metrics_api if self.settings.metrics_api else MetricsApi(left_out=True)

    def read_activity(self, service: str) -> Activity:
        return self.activity[service]

    def serves(self, kind: ObjectKind) -> bool | None:
        return self.optional.serves(kind)

    def request_warm_up(self, service: str, pod: str, report: ReportWarmUp) -> None:
        self.warm_ups.request(service, pod, report)

    def follow_adapters(self, service: str, *, is_pending: bool | None) -> Counts | None:
        return self.adapter_states.follow(service, is_pending=is_pending)

    def find_name(self, service: str, name: str) -> NameAnswer:
        return self.served_names.follow(service, name)

    def read_issuer(self) -> Issuer | None:
        return self.published_keys.issuer

    def _list_held_pods(self) -> list[HeldPod] | None:
        return list_held_pods(self.store) if self._knows_all else None

    def _mark_all(self) -> None:
        for resource in self.resources:
            for key in self.store.resources(resource.kind):
                self.workers.mark(key, urgent=False)

    def _mark_service(self, service: str) -> None:
        """Queue a reconcile of a service. Ignores services that the gateways serve but this operator does not watch."""
        namespace, _, name = service.partition("/")
        key = Key(INFERENCE_SERVICE, namespace, name)
        if self.store.uid(key) is not None:
            self.workers.mark(key)

    def _drop_series(self, key: Key, value: object) -> None:
        if value is None:
            self.metrics.drop_service(key.namespace, key.name)
            self.adapter_states.drop(f"{key.namespace}/{key.name}")

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set or a signal arrives. Raises if watching ends."""
        self.health.leads = not self.settings.leader_elect
        server = HealthServer(self.health, self.metrics, self.settings.host, self.settings.admin_port)
        await server.start()
        try:
            if await self._wait_for_crds(stop):
                await self._watch(stop)
        finally:
            await server.stop()

    @contextlib.asynccontextmanager
    async def _elected(self, stop: asyncio.Event) -> AsyncIterator[bool]:
        """Yield True once this operator may act, or False if `stop` was set first."""
        settings, health = self.settings, self.health
        if not settings.leader_elect:
            yield True
            return
        election = Election(self.cluster, settings.system_namespace, settings.lease_identity)
        async with election.led(stop, _end_at_once) as health.leads:
            yield health.leads

    async def _wait_for_crds(self, stop: asyncio.Event) -> bool:
        """Wait until all CRDs are served. Returns False if `stop` was set first."""
        for kind in (*(resource.kind for resource in self.resources), SERVED_NAME):
            async for waiting_for in wait_for(self.cluster, kind, _CRD_POLL_SECONDS):
                if waiting_for != self.health.waiting_for:
                    logger.warning("event=waiting for=%s", waiting_for)
                self.health.waiting_for = waiting_for
                if stop.is_set():
                    return False
        self.health.waiting_for = "the first list of objects"
        return True

    async def _watch(self, stop: asyncio.Event) -> None:
        """Watch with Kopf, and act while this operator leads.

        An operator that stands by watches too, so it knows all objects when it becomes the leader.
        """
        settings, ready = self.settings, asyncio.Event()
        kopf_settings = kopf.OperatorSettings()
        configure(kopf_settings, self.resources)
        namespaces = settings.watch_namespaces
        session = KopfSession(settings.kubeconfig, self.resources, namespaces, self.watches, self._report_missing)
        async with contextlib.aclosing(session), asyncio.TaskGroup() as tasks:
            acting = tasks.create_task(self._act(stop), name="act")
            beside = [tasks.create_task(each) for each in (self._report_ready(ready), self.optional.run())]

            async def end() -> None:
                stop.set()  # after a signal, a task of Kopf still waits for this flag
                for task in beside:
                    task.cancel()
                await asyncio.wait([acting, *beside])

            ours = asyncio.all_tasks()
            roots = await kopf.spawn_tasks(
                # When Kopf ends, it waits up to five seconds for tasks that still run. So our tasks end before that.
                registry=build_registry(self.resources, self.store, self.workers, session, end),
                settings=kopf_settings,
                clusterwide=not settings.watch_namespaces,
                namespaces=settings.watch_namespaces,
                ready_flag=ready,
                stop_flag=stop,
                # Without `identity`, Kopf asks the system for the user's name, but a container's uid has no name. Kopf
                # does not export the type of this argument.
                identity=cast(Any, "conveyor-operator"),
            )
            for root in roots:
                root.add_done_callback(lambda _: session.end())  # when one of them has ended, Kopf cancels the others
            await kopf.run_tasks(roots, ignored=ours)
            await end()  # again, because Kopf does not call `end` if it is stopped before it has started

    def _report_missing(self, kind: ObjectKind, is_missing: bool) -> None:
        missing = self.health.missing
        deleted = f"the CRD {kind.plural}.{kind.group} was deleted"
        if is_missing != (deleted in missing):
            missing ^= {deleted}
            logger.warning("event=waiting for=%s", ", ".join(sorted(missing)) or "nothing")

    async def _act(self, stop: asyncio.Event) -> None:
        """As the leader, run the workers and the parts that poll gateways or write objects, until `stop` is set."""
        async with self._elected(stop) as leads:
            if not leads:
                return
            running = [
                self.activity.run(),
                self.warm_ups.run(),
                self.usage.run(),
                self.key_statuses.run(),
                self.adapter_states.run(),
                self.served_names.run(self._wait_for_services),
            ]
            if self.settings.metrics_api:
                running.append(self.keeper.run())
            if self.settings.gateway_account:
                running.append(self.published_keys.run())
            try:
                async with asyncio.TaskGroup() as tasks:
                    beside = [tasks.create_task(each) for each in running]
                    await _wait_any(self._know_all(), stop.wait())
                    self.workers.start()
                    await stop.wait()
                    for task in beside:
                        task.cancel()
            finally:
                await self.workers.stop()

    async def _wait_for_services(self) -> None:
        await self.watches.wait_listed(INFERENCE_SERVICE, self.settings.watch_namespaces)

    async def _wait_for_lists(self) -> None:
        for kind in watched_kinds(self.resources):
            await self.watches.wait_listed(kind, self.settings.watch_namespaces)

    async def _know_all(self) -> None:
        """Wait until all objects, claims and keys are known.

        An earlier reconcile would try to create existing children.
        """
        await self._wait_for_lists()
        await self.served_names.synced.wait()
        if self.settings.gateway_account:
            await self.published_keys.known.wait()
        self._knows_all = True

    async def _report_ready(self, ready: asyncio.Event) -> None:
        await ready.wait()
        await self._wait_for_lists()
        self.health.waiting_for = ""
        logger.info("event=ready namespaces=%s", ",".join(self.settings.watch_namespaces) or "all")


async def _wait_any(*awaited: Coroutine[Any, Any, Any]) -> None:
    waiting = [asyncio.create_task(each) for each in awaited]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()


def _end_at_once() -> None:
    """Exit without clean-up and without finishing calls, because from now on another operator may act."""
    os._exit(1)


async def run_operator(settings: Settings, stop: asyncio.Event) -> None:
    """Connect and run the operator until it is told to stop. Raises the error that makes it impossible to continue."""
    metrics, tracer = Metrics(), build_tracer("conveyor-operator")
    configuration = await load_configuration(settings.kubeconfig)
    async with contextlib.AsyncExitStack() as stack:
        if tracer is not None:
            metrics.lost_spans.count = lambda: tracer.num_lost
            stack.callback(tracer.shut_down)
        cluster = await stack.enter_async_context(Cluster(configuration, metrics, settings.api_calls_per_second))
        await Operator(settings, cluster, metrics, tracer).run(stop)
