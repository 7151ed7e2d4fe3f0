"""Serves a model for agents. Its template shows tools, calls and thinking, in Hermes's marks."""

from pathlib import Path

from tests.engine.chat_model import write_chat_model
from tests.engine.processes import EngineServer
from tokenizers import AddedToken, Tokenizer

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.reasoning_content }}"
    "{{ message.content.split('</think>')[-1] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call | tojson }}</tool_call>{% endfor %}"
    "{{ message.tool_call_id }}<|end|>{% endfor %}{{ reasoning_effort }}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)


class AgentServer(EngineServer):
    """The server, and the tokens of its model's marks."""

    begin = end = 0


def write_agent_model(directory: Path) -> Tokenizer:
    """Write the whole model. Returns its tokenizer."""
    path = str(write_chat_model(directory) / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in ("<think>", "</think>")])
    tokenizer.save(path)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return tokenizer


def start_agent(folder: Path) -> AgentServer:
    """Start the server, for use in `with`. It is not ready yet."""
    tokenizer = write_agent_model(folder / "tiny")
    server = AgentServer(folder, folder / "tiny", max_num_seqs=2)
    server.begin, server.end = tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>")
    return server
