"""Explains which requests the metrics leave out because starting engines have places for them. Pure."""

from conveyor_api.names import IN_FLIGHT_METRIC
from conveyor_insight.facts import Facts
from conveyor_operator.inferenceservice.starting import describe_places


def count_starting(facts: Facts) -> int:
    """Return the number of desired pods that are not ready, without those that fail to start."""
    if facts.deployment is None:
        return 0
    status = facts.service.status
    if facts.now.timestamp() >= status.starting_until_unix:
        return 0
    lacking = max(0, facts.deployment.requested_replicas - facts.deployment.ready_replicas)
    return min(status.starting_replicas or 0, lacking)


def describe_starting(facts: Facts) -> str:
    """Return how many requests wait, and for how many of them starting engines have places; "" if that changes nothing.

    If no engine starts, the metrics may still compare requests from the last start with whole batches.
    """
    batch_size, starting = facts.service.batching.effective_batch_size, count_starting(facts)
    if not starting:
        counted = facts.values.get(IN_FLIGHT_METRIC)
        if facts.counts is None or not isinstance(counted, int) or counted >= facts.counts.requests:
            return ""
        requests = f"{facts.counts.requests} requests are queued or at engines"
        return f"{requests}. Those that arrived while no engine was ready are compared with whole batches."
    places = describe_places(starting, batch_size)
    if facts.counts is None:
        return f"{places}; the metrics leave out the requests for them."
    waiting = facts.counts.waiting
    beyond = max(0, waiting - starting * batch_size)
    text = f"{waiting} request{'s wait' if waiting != 1 else ' waits'}; {places}; {beyond} beyond them."
    if not beyond or (facts.deployment and facts.deployment.ready_replicas):
        return text
    needed = -(-facts.counts.requests // batch_size)
    return f"{text} No engine is ready, so the metrics call for the {needed} engines whose batches hold all requests."
