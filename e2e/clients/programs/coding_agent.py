"""Lets a coding agent read, correct and run a program. The model of e2e/demo_model/script.py knows the three calls.

usage: coding_agent.py AGENT ENVIRONMENT BASE_URL MODEL FOLDER. In the second round, the connection of the second answer
is cut in the middle, and the agent must try again. The agent has an empty HOME, and its proxy for everything but this
machine refuses connections.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

BROKEN = "def add(a, b):\n    return a - b\n\n\nassert add(2, 3) == 5\nprint('adds')\n"
LAST = "All three steps are done"
PROMPT = "Correct calc.py, then run it."
SECONDS_MAX = 150.0
CUT_BYTES = 500  # of an answer: its head and some of its body
CODEX = """\
model = "{model}"
model_provider = "conveyor"
[model_providers.conveyor]
name = "conveyor"
base_url = "{base}/v1"
env_key = "KEY"
wire_api = "responses"
"""


@dataclass(frozen=True, slots=True)
class Agent:
    """How to run an agent. In all texts, {base}, {model} and {env} are replaced."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    files: Mapping[str, str]  # in its HOME
    cut_answer: int = 2  # the answer that is cut in the second round; 0: there is no second round


def opencode_settings() -> str:
    provider = {
        "npm": "@ai-sdk/openai-compatible", "name": "conveyor", "options": {"baseURL": "{base}/v1", "apiKey": "x"},
        "models": {"{model}": {"name": "{model}"}},
    }  # fmt: skip
    return json.dumps({"share": "disabled", "autoupdate": False, "provider": {"conveyor": provider}})


def cline_settings() -> str:
    settings = {"provider": "openai-compatible", "apiKey": "x", "model": "{model}", "baseUrl": "{base}/v1"}
    provider = {"settings": settings, "updatedAt": "2026-11-29T00:00:00.000Z", "tokenSource": "manual"}
    return json.dumps(
        {"version": 1, "lastUsedProvider": "openai-compatible", "providers": {"openai-compatible": provider}}
    )


AGENTS = {
    "aider": Agent(
        ("{env}/bin/aider", "--model", "openai/{model}", "--yes-always", "--no-git", "--no-check-update",
         "--no-show-model-warnings", "--analytics-disable", "--test-cmd", "python3 calc.py", "--auto-test",
         "--message", PROMPT, "calc.py"),
        {"OPENAI_API_BASE": "{base}/v1", "OPENAI_API_KEY": "x", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        {},
        cut_answer=1,
    ),
    "cline": Agent(
        ("{env}/node_modules/.bin/cline", "--json", PROMPT),
        {"CLINE_NO_AUTO_UPDATE": "1"},
        {".cline/data/settings/providers.json": cline_settings()},
        cut_answer=0,  # cline joins the half line with the first line of the new answer
    ),
    "claude-code": Agent(
        ("{env}/node_modules/@anthropic-ai/claude-code-linux-x64/claude", "-p", PROMPT, "--model", "{model}",
         "--permission-mode", "bypassPermissions"),
        {"ANTHROPIC_BASE_URL": "{base}", "ANTHROPIC_API_KEY": "x", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
         "IS_SANDBOX": "1"},
        {},
    ),
    "codex": Agent(
        ("{env}/node_modules/.bin/codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
         PROMPT),
        {"KEY": "x"},
        {".codex/config.toml": CODEX},
    ),
    "opencode": Agent(
        ("{env}/node_modules/opencode-linux-x64/bin/opencode", "run", "-m", "conveyor/{model}", PROMPT),
        {"OPENCODE_DISABLE_MODELS_FETCH": "1"},
        {".config/opencode/opencode.json": opencode_settings()},
    ),
    "openhands": Agent(
        ("{env}/bin/python", str(Path(__file__).with_name("openhands_agent.py")), "{base}/v1", "{model}", PROMPT),
        {},
        {},
    ),
    "mini-swe-agent": Agent(
        ("{env}/bin/mini", "-m", "openai/{model}", "-t", PROMPT, "-y", "--exit-immediately"),
        {"OPENAI_API_BASE": "{base}/v1", "OPENAI_API_KEY": "x", "MSWEA_CONFIGURED": "true",
         "MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_SILENT_STARTUP": "1"},
        {},
    ),
}  # fmt: skip


class Cutter:
    """Passes connections on to the gateway, and cuts the connection of one answer in its middle."""

    def __init__(self, url: str, cut_answer: int) -> None:
        """Keep the number of the answer to cut, from 1; 0: none."""
        parts = urlsplit(url)
        self._host, self._port, self._path = parts.hostname, parts.port or 80, parts.path
        self._cut_answer = cut_answer
        self._num_answers = 0
        self.has_cut = False
        self.url = ""

    async def __aenter__(self) -> "Cutter":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}{self._path}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_gateway, to_gateway = await asyncio.open_connection(self._host, self._port)
        await asyncio.gather(self._pass(reader, to_gateway), self._pass(from_gateway, writer, counts=True))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool = False) -> None:
        left = -1  # bytes until the cut
        try:
            while data := await reader.read(65536):
                if counts and data.startswith(b"HTTP/1.1 200"):
                    self._num_answers += 1
                    left = CUT_BYTES if self._num_answers == self._cut_answer else -1
                writer.write(data if left < 0 else data[:left])
                await writer.drain()
                if 0 <= left <= len(data):
                    self.has_cut = True
                    writer.transport.abort()
                    return
                left = max(left - len(data), -1)
        except ConnectionError:
            pass
        finally:
            writer.close()


async def play(agent: Agent, words: Mapping[str, str], folder: Path) -> None:
    """Run the agent on the task. Fails unless the program is corrected and the agent says so."""
    home, task = folder / "home", folder / "task"
    for each in (home, task):
        each.mkdir(parents=True)
    (task / "calc.py").write_text(BROKEN)
    for name, text in agent.files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(fill(text, words))
    nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    local = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
    own = {name: fill(value, words) for name, value in agent.environment.items()}
    process = await asyncio.create_subprocess_exec(
        *(fill(word, words) for word in agent.command), cwd=task,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", **nowhere, **local, **own},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), SECONDS_MAX)
    except TimeoutError:
        process.kill()
        output, _ = await process.communicate()
    end_daemons(home)
    printed = output.decode(errors="replace")
    fixed = (task / "calc.py").read_text()
    is_done = process.returncode == 0 and LAST in printed and "return a + b" in fixed
    assert is_done, f"it ended with {process.returncode}:\n{printed[-3000:]}"


def end_daemons(home: Path) -> None:
    """End the processes that the agent has left behind. They have its HOME."""
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"HOME={home}\0".encode() in environment.read_bytes():
                os.kill(int(environment.parent.name), signal.SIGTERM)
        except (OSError, ValueError):
            continue


def fill(text: str, words: Mapping[str, str]) -> str:
    for name, value in words.items():
        text = text.replace("{" + name + "}", value)
    return text


async def main() -> None:
    name, environment, base, model, folder = sys.argv[1:]
    rounds = {"task": 0, "cut": AGENTS[name].cut_answer} if AGENTS[name].cut_answer else {"task": 0}
    for round_name, cut_answer in rounds.items():
        async with Cutter(base, cut_answer) as cutter:
            words = {"base": cutter.url, "model": model, "env": environment}
            await play(AGENTS[name], words, Path(folder) / round_name)
            assert cutter.has_cut == (cut_answer > 0), "no streamed answer was cut"
        print(f"passed: {round_name}", flush=True)


asyncio.run(main())
