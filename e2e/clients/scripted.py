"""SDKs and coding agents, whose model has answers that are written down (`e2e/demo_model/script.py`)."""

import sys
from typing import Final

from e2e.clients.client import PROGRAMS, Client
from e2e.clients.go_program import MODULES, build_go
from e2e.clients.java_program import MODULES as JAVA_MODULES
from e2e.clients.java_program import build_java
from e2e.clients.rust_program import VERSION, build_rust

AI_SDK = (
    *("npm:ai@6.0.326", "npm:@ai-sdk/openai@3.0.141", "npm:@ai-sdk/anthropic@3.0.140"),
    *("npm:@ai-sdk/openai-compatible@2.0.92", "npm:zod@4.6.7"),
)


OPENHANDS: Final = ("openhands-sdk==1.58.2", "openhands-tools==1.58.2")
_TASK: Final = "a task of three calls (read, edit, run), and again with a connection that is cut in an answer"


def _coding_agent(name: str, *packages: str, ran: str = _TASK) -> Client:
    """Return the row of a coding agent, whose model knows the calls that it has to make."""
    return Client(
        name,
        packages,
        (sys.executable, str(PROGRAMS / "coding_agent.py"), name, "{env}", "{base}", "{model}", "{out}"),
        ran,
        task="script",
    )


def _scripted(name: str, packages: tuple[str, ...], ran: str, program: str, *kind: str) -> Client:
    """Return the row of an SDK, whose model knows the call that it has to make."""
    interpreter = "node" if program.endswith(".mjs") else "{env}/bin/python"
    command = (interpreter, str(PROGRAMS / program), *kind, "{url}", "{model}")
    return Client(name, packages, command, ran, task="script")


def _go(name: str, kind: str, ran: str) -> Client:
    """Return the row of a client for Go. One program has all of them, because building one takes minutes."""
    command = ("{env}/clients", kind, "{url}", "{model}")
    return Client(name, (MODULES[kind],), command, ran, task="script", make=build_go)


def _java(name: str, kind: str, ran: str, *program: str) -> Client:
    """Return the row of a client for Java. `program`: the class, and its first arguments."""
    command = ("java", "-cp", "{env}/classes:{env}/lib/*", *program, "{url}", "{model}")
    packages = tuple(module.replace(":", "@") for module in JAVA_MODULES[kind])
    return Client(name, packages, command, ran, task="script", make=build_java)


LANGCHAIN_JS = (
    *("npm:@langchain/openai@1.6.0", "npm:@langchain/core@1.4.0", "npm:@langchain/anthropic@1.5.11", "npm:zod@4.6.7"),
)
_LOOPS: Final = "a text, a stream with usage, a loop of tools, the same streamed"


def _ai_sdk(provider: str) -> Client:
    """Return the row of Vercel's AI SDK with one provider."""
    schema = "" if provider == "anthropic" else "tools with a schema, "
    return Client(
        f"AI SDK, {provider}",
        AI_SDK,
        ("node", str(PROGRAMS / "ai_sdk.mjs"), provider, "{url}", "{model}"),
        f"a text, a loop of tools, the same streamed, {schema}the next turn, an abort, a retry, errors",
        task="script",
    )


SCRIPTED: Final = (
    *map(_ai_sdk, ("compatible", "chat", "responses", "anthropic")),
    *(
        _scripted(
            f"LangChain.js, {kind}", LANGCHAIN_JS, f"{_LOOPS}, an abort, a retry, errors", "langchain_js.mjs", kind
        )
        for kind in ("chat", "responses", "anthropic")
    ),
    _scripted(
        "anthropic (Node)",
        ("npm:@anthropic-ai/sdk@1.14.0",),
        f"{_LOOPS}, counts, an abort, a retry, errors",
        "anthropic_node.mjs",
    ),
    _scripted(
        "LlamaIndex.TS",
        ("npm:llamaindex@0.12.1", "npm:@llamaindex/openai@0.4.23", "npm:zod@4.6.7"),
        "a text, a stream, a loop of tools, an abort, a retry, errors",
        "llamaindex_ts.mjs",
    ),
    _scripted("Haystack", ("haystack-ai==3.4.1",), f"{_LOOPS}, an abort, a retry, errors", "haystack_python.py"),
    _scripted(
        "smolagents",
        ("smolagents[openai]==1.26.0",),
        "a text, a stream with usage, a call, an abort, a retry, errors",
        "smolagents_python.py",
    ),
    _go("openai (Go)", "openai", f"{_LOOPS}, an abort, a retry, errors"),
    _go("anthropic (Go)", "anthropic", f"{_LOOPS}, an abort, a retry, errors"),
    _go("LangChainGo", "langchaingo", "a text, a stream, a loop of tools, an abort, errors"),
    _scripted(
        "AutoGen",
        ("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"),
        "a text, a stream with usage, an agent with a tool, an abort, a retry, errors",
        "autogen_python.py",
    ),
    _java(
        "openai (Java)",
        "openai",
        "a text, a stream with usage, a loop of tools, an abort, a retry, errors",
        "JavaClients",
        "openai",
    ),
    _java("LangChain4j", "langchain4j", f"{_LOOPS}, an abort, a retry, errors", "JavaClients", "langchain4j"),
    _java("Spring AI", "spring", f"{_LOOPS}, an abort, a retry, errors", "SpringClients"),
    Client(
        "async-openai",
        (f"async-openai@{VERSION}",),
        ("{env}/rust_clients", "{url}", "{model}"),
        "a text, a stream with usage, a loop of tools, an abort, a retry, errors",
        task="script",
        make=build_rust,
    ),
    _scripted("crewAI", ("crewai==1.15.30",), "a text, an agent with a tool, a retry, errors", "crewai_python.py"),
    _scripted(
        "mirascope", ("mirascope[openai]==2.8.2",), "a text, a stream, a loop of tools, an abort, a retry, errors",
        "mirascope_python.py",
    ),
    _scripted(
        "Semantic Kernel",
        ("semantic-kernel==1.45.0",),
        "a text, a stream, a function that is called, an abort, a retry, errors",
        "semantic_kernel_python.py",
    ),
    _scripted(
        "goose-sdk",
        ("goose-sdk==0.1.0a13",),
        "a text, a stream with usage, a loop of tools, a streamed call, an abort, a retry, errors",
        "goose_python.py",
    ),
    _coding_agent("claude-code", "npm:@anthropic-ai/claude-code@2.1.197"),
    _coding_agent("codex", "npm:@openai/codex@0.171.0"),
    _coding_agent("opencode", "npm:opencode-ai@1.18.33"),
    _coding_agent("mini-swe-agent", "mini-swe-agent==2.4.6"),
    *([_coding_agent("openhands", *OPENHANDS)] if sys.version_info >= (3, 12) else []),  # as OpenHands requires
    _coding_agent("aider", "aider-chat==0.86.2"),
    _coding_agent("cline", "npm:cline@3.0.65", ran="a task of three calls (read, edit, run)"),
)  # fmt: skip
