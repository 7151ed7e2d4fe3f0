"""Makes a model whose answers are written down: each token has one successor. So agents can be tried with it.

The chat template chooses the answer: the script by the tools that the client offers, and the step by the number of
answers with calls so far. The prompt is one token, and the model continues it to the end of the step.

The task of each coding agent: read `calc.py`, correct it, run it. The script `tools` is for SDKs, and ends with JSON.
aider offers no tools: it shows the file and expects it back.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

BROKEN, MENDED = "return a - b", "return a + b"
BROKEN_FILE: Final = f"def add(a, b):\n    {BROKEN}\n\n\nassert add(2, 3) == 5\nprint('adds')\n"
LAST: Final = "All three steps are done: calc.py adds."
END: Final = "<|end|>"
CONTEXT_TOKENS: Final = 131_072
_HIDDEN = 1024  # at least the size of the vocabulary, so that tokens have orthogonal vectors
_PIECE_CHARACTERS = 10

# In these tokens, because a grammar that leaves no choice of the next text allows only the tokens of this text.
FORECAST: Final = ('{"city": "', 'Paris", "', 'degrees"', ": 21}")

Call = tuple[str, Mapping[str, Any]]
RUN: Final = "python3 calc.py"
# The tools of each script and its calls; a script is played if the client offers all tools that it calls.
SCRIPTS: Final[Mapping[str, Sequence[Call]]] = {
    "claude-code": [
        ("Read", {"file_path": "calc.py"}),
        ("Edit", {"file_path": "calc.py", "old_string": BROKEN, "new_string": MENDED}),
        ("Bash", {"command": RUN, "description": "Run it"}),
    ],
    "opencode": [
        ("read", {"filePath": "calc.py"}),
        ("edit", {"filePath": "calc.py", "oldString": BROKEN, "newString": MENDED}),
        ("bash", {"command": RUN, "description": "Run it"}),
    ],
    "codex": [
        ("exec_command", {"cmd": "cat calc.py"}),
        ("exec_command", {"cmd": f"sed -i 's/{BROKEN}/{MENDED}/' calc.py"}),
        ("exec_command", {"cmd": RUN}),
    ],
    "cline": [
        ("read_files", {"files": [{"path": "calc.py"}]}),
        ("editor", {"path": "calc.py", "old_text": BROKEN, "new_text": MENDED}),
        ("run_commands", {"commands": [RUN]}),
    ],
    "openhands": [
        ("terminal", {"command": "cat calc.py"}),
        ("terminal", {"command": f"sed -i 's/{BROKEN}/{MENDED}/' calc.py"}),
        ("terminal", {"command": RUN}),
    ],
    "semantic-kernel": [("w-get_weather", {"city": "Paris"})],
    "tools": [("get_weather", {"city": "Paris"})],
    "mini-swe-agent": [
        ("bash", {"command": "cat calc.py"}),
        ("bash", {"command": f"sed -i 's/{BROKEN}/{MENDED}/' calc.py"}),
        ("bash", {"command": RUN}),
        ("bash", {"command": f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo '{LAST}'"}),  # how it ends
    ],
}


def _steps() -> Iterator[tuple[str, str | Sequence[str]]]:
    """Yield each step's token and its text, or the pieces of the text."""
    for script, calls in SCRIPTS.items():
        for number, (name, arguments) in enumerate(calls):
            call = json.dumps({"name": name, "arguments": arguments})
            before = "" if script == "tools" else f"Step {number + 1}. "  # with a schema, only calls may precede JSON
            yield f"<|{script}-{number}|>", f"{before}<tool_call>\n{call}\n</tool_call>"
        yield f"<|{script}-{len(calls)}|>", FORECAST if script == "tools" else LAST
    yield "<|aider|>", f"calc.py\n```\n{BROKEN_FILE.replace(BROKEN, MENDED)}```\n{LAST}"
    yield "<|plain|>", "Yes."


def find_last(script: str) -> str:
    """Return the text after the last call."""
    return "".join(FORECAST) if script == "tools" else LAST


def _cut(text: str, taken: set[str]) -> Iterator[str]:
    """Yield the text in pieces, none of which another step has."""
    while text:
        length = _PIECE_CHARACTERS
        while text[:length] in taken and length < len(text):
            length += 1
        piece, text = text[:length], text[length:]
        while piece in taken:  # at the end of the text, where it cannot grow
            piece = piece + " "
        taken.add(piece)
        yield piece


def _template() -> str:
    needs = {script: sorted({name for name, _ in calls}) for script, calls in SCRIPTS.items()}
    cases = "".join(
        "{%- if chosen.script == '' and "
        + " and ".join(f"'{name}' in names" for name in names)
        + f" %}}{{%- set chosen.script = '{script}' %}}{{%- set chosen.last = {len(SCRIPTS[script])} %}}{{%- endif %}}"
        for script, names in needs.items()
    )
    return (
        "{#- calls are written in <tool_call> -#}"
        "{%- set names = (tools or []) | map(attribute='function.name') | list %}"
        "{%- set chosen = namespace(script='', step=0, last=0) %}" + cases + "{%- for message in messages %}"
        "{%- if message.role == 'assistant' and message.tool_calls %}"
        "{%- set chosen.step = chosen.step + 1 %}{%- endif %}{%- endfor %}"
        "{%- if chosen.script %}<|{{ chosen.script }}-{{ [chosen.step, chosen.last] | min }}|>"
        "{% elif 'entire content of the updated file' in (messages | last).content %}<|aider|>"
        "{% else %}<|plain|>{% endif %}"
    )


def train(directory: Path, log: Callable[[str], None]) -> None:
    """Write the model. Nothing is trained."""
    taken = set(FORECAST)
    chains = [[token, *(_cut(text, taken) if isinstance(text, str) else text), END] for token, text in _steps()]
    _write_weights(directory, _write_tokenizer(directory, chains))
    log(f"{len(chains)} answers of {sum(map(len, chains))} tokens")


def _write_tokenizer(directory: Path, chains: Sequence[Sequence[str]]) -> list[list[int]]:
    """Write the tokenizer and the chat template. Returns the chains' token ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, *(token for token, *_ in chains)])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for _, *pieces, _ in chains for piece in pieces])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    fast.chat_template = _template()
    fast.save_pretrained(directory)
    return [[tokenizer.token_to_id(piece) for piece in chain] for chain in chains]


def _write_weights(directory: Path, chains: Sequence[Sequence[int]]) -> None:
    """Write weights with which the last token alone decides the next one: attention and MLP add nothing."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    size, end = 1 + max(map(max, chains)), chains[0][-1]
    assert size <= _HIDDEN, f"{size} tokens"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size, hidden_size=_HIDDEN, intermediate_size=8, num_hidden_layers=1, num_attention_heads=16,
        num_key_value_heads=1, max_position_embeddings=CONTEXT_TOKENS, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=end, pad_token_id=end,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    codes = torch.nn.init.orthogonal_(torch.empty(size, _HIDDEN))
    follows = torch.zeros(size, _HIDDEN)
    for chain in chains:
        for before, after in pairwise(chain):
            follows[after] += 10 * codes[before]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(codes)
        model.lm_head.weight.copy_(follows)
        for matrix in (model.model.layers[0].self_attn.o_proj, model.model.layers[0].mlp.down_proj):
            matrix.weight.zero_()
    model.save_pretrained(directory)
