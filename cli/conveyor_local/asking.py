"""`--ask`: prints a service's answer to a question as it arrives. Used by `running`."""

import json
from collections.abc import Callable
from typing import Any, Final

import aiohttp

from conveyor_local.service import Service

_TOKENS_MAX: Final = 200


async def ask(http: aiohttp.ClientSession, service: Service, text: str, write: Callable[[str], None]) -> str:
    """Pass the parts of the answer to `write`. Returns the problem, or ""."""
    if (service.service.task or "Generate") != "Generate":
        return f"--ask is for services of the task Generate, and {service.key} has {service.service.task}"
    messages = [{"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": _TOKENS_MAX, "temperature": 0, "stream": True}
    try:
        async with http.post(f"{service.status['url']}/chat/completions", json=body) as response:
            if response.status != 200:
                return f"--ask: HTTP {response.status}: {(await response.text())[:300]}"
            async for line in response.content:
                if line.startswith(b"data: {"):
                    write(_find_text(json.loads(line[6:])))
    except _Failed as error:
        return f"--ask: {error}"
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"--ask: {type(error).__name__}: {error}"
    return ""


class _Failed(Exception):
    """An event of the stream reported an error."""


def _find_text(event: dict[str, Any]) -> str:
    if "error" in event:
        raise _Failed(event["error"]["message"])
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
