"""Reads what callers have used from the ConfigMap that the operator keeps, with the console's own rights.

`callers` decides what a reader sees of it.
"""

import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec
from kubernetes.aio.client import ApiClient

from conveyor_api.names import USAGE_NAME
from conveyor_console.kubernetes_api import Unanswered, call
from conveyor_console.sharing import Shared
from conveyor_protocol.usage_rows import UsageRow, read_kept, sum_rows

logger = logging.getLogger(__name__)

DAYS: Final = (1, 7, 31)  # periods that a page can show, today included
_MAX_BYTES: Final = 4 << 20  # a ConfigMap has at most 1 MiB, and JSON escapes its quotes
_KEPT_SECONDS: Final = 15.0  # the operator writes this often


class _ConfigMap(msgspec.Struct):
    data: dict[str, str] | None = None


class Usage:
    """What callers have used, with the classes of a caller as one row."""

    def __init__(self, client: ApiClient, system_namespace: str) -> None:
        self._client = client
        self._path = f"/api/v1/namespaces/{system_namespace}/configmaps/{USAGE_NAME}"
        self._kept = Shared[int, tuple[Sequence[UsageRow], str]](_KEPT_SECONDS, len(DAYS))

    async def read(self, days: int) -> tuple[Sequence[UsageRow], str]:
        """Return the rows of these last days (UTC), and why there are none, or ""."""
        return await self._kept.get(days, lambda: self._read(days))

    async def _read(self, days: int) -> tuple[Sequence[UsageRow], str]:
        first = datetime.now(UTC).date() - timedelta(days=days - 1)
        try:
            status, content = await call(self._client, "GET", self._path, _MAX_BYTES)
            if status == 404:
                return (), "No gateway has reported usage yet."
            if status != 200:
                return (), f"Kubernetes answers with status {status}."
            data = msgspec.json.decode(content, type=_ConfigMap).data or {}
            rows = sum_rows(
                msgspec.structs.replace(row, request_class="") for row in read_kept(data, first) if row.requests
            )
        except (Unanswered, ValueError) as error:  # msgspec's errors are ValueErrors
            logger.warning("event=usage_unreadable error=%s", error)
            return (), "The usage cannot be read."
        return rows, "" if rows else "Nothing was used in this time."
