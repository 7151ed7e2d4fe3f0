"""Reconciles one resource: makes the cluster match the resource's spec.

The steps are: get -> begin (parse, observe, build) -> plan, execute and observe, until nothing is left -> status and
Events. `workers` passes a key, not an event. Each reconcile compares the observed with the desired state and makes the
changes that are missing, so it may start at any time and stop at any point. What differs between kinds of resources is
behind the protocol in `resource`.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from conveyor_api import names
from conveyor_api.conditions import Reason
from conveyor_api.errors import InvalidResource
from conveyor_operator.cluster import Cluster
from conveyor_operator.errors import ApiError, Conflict, Refused
from conveyor_operator.kinds import Key
from conveyor_operator.loop.child import ChildId, hash_of, observe_child
from conveyor_operator.loop.contests import Contest, explain
from conveyor_operator.loop.differences import is_restored
from conveyor_operator.loop.owner import Object
from conveyor_operator.loop.report import Reporter
from conveyor_operator.loop.resource import Case, Resource
from conveyor_operator.loop.steps import Applied, Apply, Delete, Hold, Memory, Obstacle, RequeueAt, Step
from conveyor_operator.loop.store import Store
from conveyor_operator.loop.workers import Outcome

logger = logging.getLogger(__name__)


class Reconciler:
    """Reconciles resources of all registered kinds, one resource in each call of `reconcile`."""

    def __init__(self, resources: Sequence[Resource], cluster: Cluster, store: Store) -> None:
        self._resources = {resource.kind: resource for resource in resources}
        self._kinds = {
            kind.kind: kind for resource in resources for kind in (*resource.children, *resource.grandchildren)
        }
        self._cluster = cluster
        self._store = store
        self._reporter = Reporter(cluster)
        self._memories: dict[Key, Memory] = {}

    async def reconcile(self, key: Key) -> Outcome:
        """Reconcile the resource with this key. Returns whether and when to reconcile again. Raises ApiError."""
        uid = self._store.uid(key)
        body = None if uid is None else self._store.bodies.get(uid) or await self._cluster.get(*key)
        if body is None or "deletionTimestamp" in body["metadata"]:
            self._memories.pop(key, None)  # the garbage collector deletes the children with their owner
            return Outcome()
        resource, memory = self._resources[key.kind], self._recall(key, body)
        try:
            case = resource.begin(body, self._store, memory)
        except InvalidResource as error:
            status = resource.build_invalid_status(body, str(error), datetime.now(UTC))
            await self._write_status(key, resource, body, status)
            return Outcome()
        try:
            requeue = await self._bring_about(key, case, memory)
        except ApiError as error:
            # The first failure is only retried. From the second on, the status reports the failure, unless the API
            # server is unreachable or overloaded. Then writing the status would fail too.
            if memory.failing and not error.wants_silence:
                await self._report(key, resource, body, case, memory)
            memory.failing = True
            raise
        memory.failing = False
        await self._report(key, resource, body, case, memory)
        return Outcome(bool(memory.refused), requeue)

    async def _bring_about(self, key: Key, case: Case, memory: Memory) -> datetime | None:
        """Look up, plan and execute until nothing is left to do.

        Returns when to reconcile again; None if the plan does not need it.
        """
        while True:
            for id in sorted(case.stale):
                with _recorded_as_obstacle(memory, id):
                    await self._look_up(key, case, id)
            now = datetime.now(UTC)
            plan = case.plan(now)
            steps = [step for step in plan if not isinstance(step, RequeueAt)]
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("event=planned key=%s steps=%s", key, "; ".join(map(_describe, plan)) or "none")
            if not steps:
                times = [step.at for step in plan if isinstance(step, RequeueAt)]
                times += _find_ends(memory, now)
                memory.waiting_since = (memory.waiting_since or now) if times else None
                return min(times, default=None)
            for step in steps:
                if step.id not in memory.refused:
                    await self._execute(key, case, memory, step)

    async def _look_up(self, key: Key, case: Case, id: ChildId) -> bool:
        """Read a child from the API server. Returns whether it exists."""
        case.stale.discard(id)
        found = await self._cluster.get(self._kinds[id[0]], key.namespace, id[1])
        if found is not None:
            case.see(found)
        return found is not None

    async def _execute(self, key: Key, case: Case, memory: Memory, step: Step) -> None:
        """Execute a step. If its call fails, record an obstacle. Raise the error unless it refuses an apply or hold."""
        memory.done.append(step)
        match step:
            case Apply():
                with contextlib.suppress(Refused), _recorded_as_obstacle(memory, step.id):
                    await self._apply(key, case, memory, step)
            case Hold():
                with contextlib.suppress(Refused), _recorded_as_obstacle(memory, step.id):
                    await self._hold(key, case, step)
            case Delete():
                with _recorded_as_obstacle(memory, step.id):
                    await self._delete(key, case, memory, step)

    async def _apply(self, key: Key, case: Case, memory: Memory, step: Apply) -> None:
        """Apply a child. If it exists, but no watch has reported it, only read it: the next plan decides about it.

        An object without the operator's labels may have the child's name, and must not be overwritten.
        """
        logger.info("event=apply key=%s kind=%s name=%s reason=%s", key, *step.id, step.reason)
        kind, before = self._kinds[step.id[0]], case.children.get(step.id)
        contest, edited = memory.contests.get(step.id), None
        if before is not None and contest is not None and contest.pauses_next:
            edited = await self._cluster.get(kind, key.namespace, before.name)
        former = memory.applied.pop(step.id, None)
        try:
            found = await self._cluster.apply(kind, step.body, names.FIELD_MANAGER, must_be_new=before is None)
        except Conflict:
            if before is not None or not await self._look_up(key, case, step.id):
                raise
            memory.done.remove(step)
            if former is not None:
                memory.applied[step.id] = former
            return
        case.see(found)
        applied = Applied(hash_of(step.body), observe_child(found).fingerprint)
        memory.applied[step.id] = applied
        if is_restored(step, before, former, applied):
            memory.restored[step.id] = before is None
            cause = explain(step.id, edited, found) if contest is not None and contest.pauses_next else ""
            memory.contests[step.id] = Contest(contest.restores + 1 if contest else 1, datetime.now(UTC), cause)
        elif step.reason == "changed":
            memory.contests.pop(step.id, None)

    async def _hold(self, key: Key, case: Case, step: Hold) -> None:
        kind, name = self._kinds[step.id[0]], step.id[1]
        body = {
            "apiVersion": kind.api_version,
            "kind": kind.kind,
            "metadata": {"name": name, "namespace": key.namespace},
            "spec": {"replicas": step.count},
        }
        logger.info("event=hold_replicas key=%s count=%d", key, step.count)
        case.see(await self._cluster.apply(kind, body, names.REPLICAS_FIELD_MANAGER, force=step.force))

    async def _delete(self, key: Key, case: Case, memory: Memory, step: Delete) -> None:
        kind, name = step.id
        logger.info("event=delete key=%s kind=%s name=%s", key, kind, name)
        await self._cluster.delete(self._kinds[kind], key.namespace, name, step.uid)
        memory.applied.pop(step.id, None)
        memory.contests.pop(step.id, None)
        case.lose(step.id)

    async def _report(self, key: Key, resource: Resource, body: Object, case: Case, memory: Memory) -> None:
        await self._write_status(key, resource, body, case.build_status(datetime.now(UTC)))
        for child, deleted in memory.restored.items():
            await self._reporter.record_restored(body, memory, child, resource.restored(child, deleted))

    async def _write_status(self, key: Key, resource: Resource, body: Object, status: Object) -> None:
        if self._store.uid(key) is not None:  # otherwise a service that was deleted meanwhile would be exposed for ever
            resource.expose(body, status)
        written = await self._reporter.write(resource.kind, body, status)
        if written is not None:
            if self._store.uid(key) == written["metadata"]["uid"]:  # nothing would drop the body of a deleted one
                self._store.bodies.put(key, written)
            await self._reporter.record_events(body, resource.find_events(body.get("status") or {}, status))

    def _recall(self, key: Key, body: Object) -> Memory:
        uid = str(body["metadata"]["uid"])
        memory = self._memories.get(key)
        if memory is None or memory.uid != uid:
            memory = self._memories[key] = self._resources[key.kind].new_memory(uid)
        memory.begin(datetime.now(UTC))
        return memory


@contextlib.contextmanager
def _recorded_as_obstacle(memory: Memory, id: ChildId) -> Iterator[None]:
    """Record an ApiError as an obstacle, with the API server's own message, and raise it again."""
    try:
        yield
    except ApiError as error:
        temporary, message = not isinstance(error, Refused), f"{' '.join(id)}: {error.message}"
        memory.refused[id] = Obstacle(*id, Reason.CHILD_REFUSED, message, temporary)
        raise


def _find_ends(memory: Memory, now: datetime) -> list[datetime]:
    """Return when pauses and contests end, because no watch reports this."""
    times = [(contest.resumes_at, contest.ends_at) for contest in memory.open_contests.values()]
    return [min(at for at in each if at > now) for each in times if each[-1] > now]


def _describe(step: Step) -> str:
    """Return a step as two or three words for the log, without its object."""
    kind = type(step).__name__
    return f"{kind} {step.at.isoformat()}" if isinstance(step, RequeueAt) else f"{kind} {step.id[0]} {step.id[1]}"
