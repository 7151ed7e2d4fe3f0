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
        """Return whether images go before decodes in the next step of these requests.

        They do not go before a request that is more urgent than all that wait.
        """
        levels: dict[bool, list[int]] = {True: [], False: []}
        for each in requests:
            levels[bool(each.pictures) and each.wanted_picture is not None].append(each.level)
        waiting, others = levels[True], levels[False]
        if not waiting or min(others, default=waiting[0]) < min(waiting):
            self._num_first = 0
        elif len(waiting) > len(others):
            self._num_first = len(waiting)
        else:
            self._num_first = min(self._num_first, len(waiting))
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
