"""Compares the gateway, which sends requests with one beginning to one engine, with one that looks at the load only.

Both gateways share real engines with a model of random weights, and take turns. Each turn has new texts, so nothing of
an earlier turn is cached. Three kinds of traffic:

- conversations: users with a common system prompt, who wait for each answer and then pause before the next turn;
- documents: questions about documents, in random order; each prompt begins with its document;
- single: prompts that have nothing in common, to show what homes cost where they cannot help.

Prints for each kind the part of the prompt tokens that came from the prefix cache, the requests per second, and the
time to the first token. The last line is one JSON object.
"""

import argparse
import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Final

import aiohttp
import torch
from tests.engine.processes import EngineServer
from tests.gateway.cluster import Cluster, own_address
from tests.gateway.process import GatewayProcess
from transformers import AutoConfig, AutoModelForCausalLM

from conveyor_load.percentiles import percentile
from e2e.cluster.api import Api, wait_until
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions
from e2e.demo_model import demo_model_directory

ROWS: Final = 8
TOKENS: Final = 8
PAUSE_SECONDS: Final = 1.0  # the mean; without pauses, the engine whose answer has just ended would often be the next
HOMES, LOAD_ONLY = "homes", "load only"
PROGRAMS: Final = {HOMES: "conveyor_gateway", LOAD_ONLY: "conveyor_bench.gateway.homeless"}
SERVICE: Final = "qwen"
# Prompts of 1,000 tokens take about 0.3 s of a core, so that most of the work can be saved.
SHAPE: Final = {
    "num_hidden_layers": 12,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class User:
    """One after another, these messages are sent, each with all messages and answers before it."""

    system: str
    messages: list[str]


@dataclass
class Side:
    """What was measured with one gateway and one kind of traffic."""

    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    per_second: list[float] = field(default_factory=list)
    first_seconds: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        return {
            "cached": self.cached_tokens / self.prompt_tokens,
            "requests_per_second": median(self.per_second),
            "first_token_p50": median(self.first_seconds),
            "first_token_p95": percentile(self.first_seconds, 95),
        }


def write(random: Random, num_words: int) -> str:
    return " ".join(
        f"{random.choice('bcdfgklmnprst')}{random.choice('aeiou')}{random.randrange(100)}" for _ in range(num_words)
    )


def draw_conversations(random: Random) -> list[User]:
    system = write(random, 100)
    return [User(system, [write(random, 40) for _ in range(5)]) for _ in range(24)]


def draw_documents(random: Random) -> list[User]:
    documents = [write(random, 250) for _ in range(12)]
    questions = [User("", [f"{document}\n\n{write(random, 10)}"]) for document in documents for _ in range(8)]
    random.shuffle(questions)
    return questions


def draw_single(random: Random) -> list[User]:
    return [User("", [write(random, 150)]) for _ in range(96)]


KINDS: Final[dict[str, Callable[[Random], list[User]]]] = {
    "conversations": draw_conversations,
    "documents": draw_documents,
    "single": draw_single,
}


async def send(http: aiohttp.ClientSession, url: str, messages: list[Message]) -> tuple[float, str]:
    """Return the seconds to the first token, and the answer. Raises RuntimeError without one."""
    body = {"messages": messages, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    began, first, answer = time.monotonic(), 0.0, ""
    async with http.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {(await response.text())[:200]}")
        async for line in response.content:
            if line.startswith(b"data: {") and (choices := json.loads(line[6:])["choices"]):
                first = first or time.monotonic() - began
                answer += choices[0]["delta"].get("content") or ""
    return first, answer


async def talk(http: aiohttp.ClientSession, url: str, user: User, random: Random) -> list[float]:
    """Send the user's messages, after pauses. Return the seconds to the first token of each."""
    messages = [{"role": "system", "content": user.system}] if user.system else []
    took = []
    for text in user.messages:
        await asyncio.sleep(random.expovariate(1 / PAUSE_SECONDS))
        messages.append({"role": "user", "content": text})
        seconds, answer = await send(http, url, messages)
        messages.append({"role": "assistant", "content": answer})
        took.append(seconds)
    return took


async def run_users(url: str, users: Sequence[User], concurrency: int) -> tuple[list[float], float]:
    """Let this many users talk at once. Return the seconds to the first tokens, and of the whole."""
    waiting, first_seconds, random = list(users), list[float](), Random(0)

    async def go_on(http: aiohttp.ClientSession) -> None:
        while waiting:
            first_seconds.extend(await talk(http, url, waiting.pop(), random))

    began = time.monotonic()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(go_on(http) for _ in range(concurrency)))
    return first_seconds, time.monotonic() - began


def count(gateway: GatewayProcess, name: str) -> float:
    return gateway.metric(f"conveyor_gateway_{name}", namespace="default", inference_service=SERVICE)


def measure(gateways: dict[str, GatewayProcess], rounds: int, concurrency: int) -> dict[str, dict[str, Side]]:
    sides = {kind: {name: Side() for name in gateways} for kind in KINDS}
    for number in range(rounds):
        for kind, draw in KINDS.items():
            for name, gateway in list(gateways.items())[:: 1 if number % 2 else -1]:
                print(f"round {number + 1} of {rounds}: {kind}, {name}", end="\r", file=sys.stderr)
                users, side = draw(Random(f"{number} {name}")), sides[kind][name]
                before = [count(gateway, f"{each}prompt_tokens_total") for each in ("", "cached_")]
                took, seconds = asyncio.run(run_users(f"{gateway.url}/default/{SERVICE}", users, concurrency))
                after = [count(gateway, f"{each}prompt_tokens_total") for each in ("", "cached_")]
                side.prompt_tokens += after[0] - before[0]
                side.cached_tokens += after[1] - before[1]
                side.first_seconds += took
                side.per_second.append(len(took) / seconds)
    return sides


def make_model(folder: Path) -> Path:
    """Write a model with the demo's tokenizer, SHAPE and random weights."""
    shutil.copytree(demo_model_directory(), folder)
    config = AutoConfig.from_pretrained(folder, **SHAPE)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@contextlib.contextmanager
def running(num_engines: int) -> Iterator[dict[str, GatewayProcess]]:
    """Run the engines and both gateways. Yields the gateways."""
    address = own_address()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        control_plane = stack.enter_context(ControlPlane())
        api = Api(control_plane.kubeconfig)
        install_definitions(api)
        cluster = Cluster(api, "default")
        model = make_model(folder / "model")
        flags: dict[str, object] = {"host": "0.0.0.0", "max_num_seqs": ROWS, "dtype": "bfloat16", "num_kv_blocks": 4096}
        engines = [
            stack.enter_context(EngineServer(folder / f"engine-{number}", model, **flags))  # type: ignore[arg-type]
            for number in range(num_engines)
        ]
        gateways = {
            name: stack.enter_context(GatewayProcess(control_plane.kubeconfig, program=program))
            for name, program in PROGRAMS.items()
        }
        cluster.apply_service(SERVICE, batching={"maxBatchSize": ROWS}, queue={"timeout": "10m"})
        for engine in engines:
            cluster.apply_engine(SERVICE, address, int(engine.wait_ready().url.rpartition(":")[2]))
        for gateway in gateways.values():
            wait_until("the engines", partial(lambda gateway: count(gateway, "engines") == num_engines, gateway))
        yield gateways


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench prefixes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="turns of each gateway and kind (default: %(default)s)")
    parser.add_argument("--engines", type=int, default=4, help="number of engines (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=24, help="users at a time (default: %(default)s)")
    options = parser.parse_args(arguments)
    with running(options.engines) as gateways:
        sides = measure(gateways, options.rounds, options.concurrency)
    result = {kind: {name: side.summary() for name, side in of_kind.items()} for kind, of_kind in sides.items()}
    print(f"{'':14} {'':10} {'cached':>7} {'requests/s':>11} {'first token p50, p95, ms':>25}")
    for kind, of_kind in result.items():
        for name, side in of_kind.items():
            first = f"{side['first_token_p50'] * 1000:,.0f}, {side['first_token_p95'] * 1000:,.0f}"
            print(f"{kind:14} {name:10} {side['cached']:7.2f} {side['requests_per_second']:11.1f} {first:>25}")
    print(json.dumps({"benchmark": "prefixes", "engines": options.engines, "kinds": result}))
    return 0
