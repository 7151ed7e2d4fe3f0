"""What one request has used of the engine's steps so far. Kept by `meter`, which writes its receipt from it."""


class Account:
    """While the request `decodes`, its steps since `since` are not added yet."""

    __slots__ = (
        "batch_wait_seconds",
        "close_reason",
        "decodes",
        "first_token_time",
        "num_rows",
        "num_steps",
        "padding_seconds",
        "preempted_at",
        "seconds",
        "seconds_when_finished",
        "since",
        "since_rows",
        "since_steps",
    )

    def __init__(self) -> None:
        self.seconds = self.padding_seconds = 0.0  # its part of its steps, and what dummies cost of that
        self.num_steps = self.num_rows = 0  # its steps, and the sum of their rows
        self.decodes = False  # whether it has decoded in the last step, and has not ended
        # The sums over all steps when it began to decode.
        self.since = 0.0
        self.since_rows = self.since_steps = 0
        self.batch_wait_seconds = 0.0  # how long its batch waited to be closed
        self.close_reason: str | None = None  # why its batch closed; None if requests join at each step
        self.first_token_time: float | None = None
        self.preempted_at: tuple[float, ...] = ()
        self.seconds_when_finished: float | None = None  # from then on its row computes dummies

    def add(self, seconds: float, num_rows: int) -> None:
        """Add its part of a step with this number of rows."""
        self.seconds += seconds
        self.num_rows += num_rows
        self.num_steps += 1
