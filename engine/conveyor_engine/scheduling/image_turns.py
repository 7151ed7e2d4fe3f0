"""Decides which images are encoded beside a step, and whether they go before decodes. Used by `running_batch` only.

Pure: no torch, no clock. `tasks.generate` turns the decision into seconds (`execution.slices`).
"""

from collections.abc import Collection, Iterable

from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.step import Step


class ImageTurns:
    """Images go first while most requests wait for images, until as many are encoded as requests waited.

    So requests that arrive together soon decode together. While at most half of the requests wait, images get a small
    share of the time, so that the others hardly notice them.
    """

    def __init__(self) -> None:
        self._num_first = 0  # so many images still go first

    def go_first(self, requests: Collection[RequestState]) -> bool:
        """Return whether images go before decodes in the next step of these requests."""
        num_waiting = sum(bool(each.pictures) and each.wanted_picture is not None for each in requests)
        is_most = 2 * num_waiting > len(requests)
        self._num_first = num_waiting if is_most else min(self._num_first, num_waiting)
        return self._num_first > 0

    def add(self, step: Step, rows: Iterable[RequestState]) -> None:
        """Let the step encode the images that rows wait for. Requests take turns after each image."""
        seeing = [request for request in rows if request.pictures]
        in_turns = sorted(seeing, key=lambda request: (request.level, request.num_encoded))
        wanted = [(each, picture) for each in in_turns if (picture := each.wanted_picture) is not None]
        step.wanted_pictures += [picture for _, picture in wanted]
        step.first_seeing = wanted[0][0] if wanted else None
        step.held_pictures += [digest for each in seeing for digest in each.held_pictures]
        step.images_first = bool(wanted) and self._num_first > 0

    def note_encoded(self, encoded: Collection[bytes], requests: Iterable[RequestState]) -> None:
        """Let requests go on that waited for these images."""
        num_freed = sum(request.note_encoded(encoded) for request in requests) if encoded else 0
        self._num_first = max(0, self._num_first - num_freed)
