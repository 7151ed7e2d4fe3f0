"""Answers as each family of models writes them, with their calls, and how a client joins the parts of an answer."""

import json
from collections.abc import Sequence
from typing import Any

from conveyor_engine.text.parsing.formats import CHANNELS, COMMAND
from conveyor_engine.text.parsing.interface import OutputParser, Part

WEATHER = '{"city": "São \\"Paulo\\"", "days": [1, {"a": "}]"}]}'
CALL = ("get_weather", json.loads(WEATHER))
TIME = ("get_time", {})
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
KIMI_BEGIN, KIMI_SEP, KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
KIMI_ALL, KIMI_ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
ALL, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

# format, answer, content, calls
Example = tuple[str, str, str, list[tuple[str, Any]]]
EXAMPLES: list[Example] = [
    ("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>', "", [CALL]),
    (
        "hermes",
        f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\n',
        "Let me see.",
        [CALL, TIME],
    ),
    ("hermes", f'<tool_call>{{"arguments": {WEATHER}, "name": "get_weather"}}</tool_call>', "", [CALL]),
    ("hermes", '<tool_call>{"id": 1, "name": "get_time", "arguments": {}, "x": [2]}</tool_call>Hi', "Hi", [TIME]),
    ("hermes", "a < b, <tool> and\n\n <tool_call", "a < b, <tool> and\n\n <tool_call", []),
    ("hermes", "<tool_call>none</tool_call> ", "<tool_call>none</tool_call> ", []),
    ("hermes", '<tool_call>\n{"name": "f"}\n</tool_call>', '<tool_call>\n{"name": "f"}\n</tool_call>', []),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}', '<tool_call>{"name": 5, "arguments": {}}', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}', '<tool_call>{"name": "f", "arguments": "{}"}', []),
    ("hermes", '<tool_call>{"name": "get_ti', '<tool_call>{"name": "get_ti', []),
    ("hermes", '<tool_call>{"name": "\\x", "arguments": {}}', '<tool_call>{"name": "\\x", "arguments": {}}', []),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {WEATHER}}}', "", [CALL]),
    ("llama3_json", f'<|python_tag|>{{"name": "get_weather", "parameters": {WEATHER}}}', "", [CALL]),
    (
        "llama3_json",
        f'{{"name": "get_weather", "parameters": {WEATHER}}}; {{"name": "get_time", "parameters": {{}}}}',
        "",
        [CALL, TIME],
    ),
    ("llama3_json", ' {"type": "function", "name": "get_time", "parameters": {}}', "", [TIME]),
    ("llama3_json", '{"name": "Bob", "age": 5} is he', '{"name": "Bob", "age": 5} is he', []),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("llama3_json", "<|py{}", "<|py{}", []),
    ("llama3_json", "Hello {", "Hello {", []),
    ("list", f'[{{"name": "get_weather", "arguments": {WEATHER}}}, {{"name": "get_time", "parameters": {{}}}}]', "",
     [CALL, TIME]),
    ("list", "[1, 2]", "[1, 2]", []),
    ("mistral", f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {WEATHER}}}]', "", [CALL]),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}}}, {{"name": "get_time", "arguments": {{}}}}]',
        "",
        [CALL, TIME],
    ),
    ("mistral", f"Yes.[TOOL_CALLS]get_weather[ARGS]{WEATHER}[TOOL_CALLS]get_time[ARGS]{{}}", "Yes.", [CALL, TIME]),
    ("mistral", f"Yes.[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{WEATHER}", "Yes.", [CALL]),
    ("mistral", "Yes.[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e", "Yes.[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e", []),
    ("mistral", f"[TOOL_CALLS]get_weather{WEATHER}", "", [CALL]),
    ("mistral", "[TOOL_CALLS]none", "[TOOL_CALLS]none", []),
    ("mistral", "[TOOL_CALLS][1]", "[TOOL_CALLS][1]", []),
    (
        "deepseek_v3",
        f"{ALL}{BEGIN}function{SEP}get_weather\n```json\n{WEATHER}\n```{END}\n{BEGIN}function{SEP}get_time\n"
        f"```json\n{{}}\n```{END}{ALL_END}",
        "",
        [CALL, TIME],
    ),
    (
        "deepseek_v31",
        f"I look.{ALL}{BEGIN}get_weather{SEP}{WEATHER}{END}{BEGIN}get_time{SEP}{{}}{END}{ALL_END}",
        "I look.",
        [CALL, TIME],
    ),
    (
        "qwen3_coder",
        'Well:\n<tool_call>\n<function=get_weather>\n<parameter=city>\nSão "Paulo"\n</parameter>\n<parameter=days>\n'
        '[1, {"a": "}]"}]\n</parameter>\n</function>\n</tool_call>',
        "Well:",
        [CALL],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=write>\n<parameter=text>\n12\n\n  x</y>\n\n</parameter>\n<parameter=times>\nTrue\n"
        "</parameter>\n<parameter=how>\nlike this\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=get_time>\n</function>\n</tool_call>",
        "",
        [("write", {"text": "12\n\n  x</y>\n", "times": True, "how": "like this"}), TIME],
    ),
    ("qwen3_coder", "<function=get_time></function>", "", [TIME]),
    ("qwen3_coder", "<tool_call>\n{}</tool_call>", "<tool_call>\n{}</tool_call>", []),
    ("qwen3_coder", "<tool_call>\n<funk", "<tool_call>\n<funk", []),
    (
        "glm45",
        'Well:\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>São "Paulo"</arg_value>\n'
        '<arg_key>days</arg_key>\n<arg_value>[1, {"a": "}]"}]</arg_value>\n</tool_call>\n'
        "<tool_call>get_time\n</tool_call>",
        "Well:",
        [CALL, TIME],
    ),
    (
        "glm45",
        "<tool_call>write<arg_key>text</arg_key><arg_value>12</arg_value><arg_key>n</arg_key><arg_value>5</arg_value>"
        "</tool_call>",
        "",
        [("write", {"text": "12", "n": 5})],
    ),
    ("glm45", "<tool_call>", "<tool_call>", []),
    ("glm45", "<tool_call>get_ti", "<tool_call>get_ti", []),
    (
        "minimax_m2",
        'I look.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">São "Paulo"</parameter>\n'
        '<parameter name="days">[1, {"a": "}]"}]</parameter>\n</invoke>\n<invoke name="get_time">\n</invoke>\n'
        "</minimax:tool_call>",
        "I look.",
        [CALL, TIME],
    ),
    ("minimax_m2", "<minimax:tool_call>\nnone", "<minimax:tool_call>\nnone", []),
    (
        "seed_oss",
        '<seed:tool_call>\n<function=get_weather>\n<parameter=city>São "Paulo"</parameter>\n'
        '<parameter=days>[1, {"a": "}]"}]</parameter>\n</function>\n</seed:tool_call>',
        "",
        [CALL],
    ),
    ("granite", f'<|tool_call|>[{{"name": "get_weather", "arguments": {WEATHER}}}]', "", [CALL]),
    (
        "granite",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {WEATHER}}}, {{"name": "get_time", "arguments": {{}}}}]'
        "<|/tool_call|>",
        "",
        [CALL, TIME],
    ),
    (
        "jamba",
        f'Yes.<tool_calls>[\n{{"name": "get_weather", "arguments": {WEATHER}}},\n'
        '{"name": "get_time", "arguments": {}}\n]</tool_calls>',
        "Yes.",
        [CALL, TIME],
    ),
    (
        "internlm",
        f'I look.<|action_start|><|plugin|>\n{{"name": "get_weather", "parameters": {WEATHER}}}<|action_end|>\n',
        "I look.",
        [CALL],
    ),
    ("phi4_mini_json", f'functools[{{"name": "get_weather", "arguments": {WEATHER}}}]', "", [CALL]),
    ("phi4_mini_json", "import functools", "import functools", []),
    ("phi4_mini_json", "functools[0] and functools.cache", "functools[0] and functools.cache", []),
    (
        "lfm2",
        "<|tool_call_start|>[get_weather(city='São \"Paulo\"', days=[1, {'a': \"}]\"}]), get_time()]"
        "<|tool_call_end|>Wait",
        "Wait",
        [CALL, TIME],
    ),
    (
        "llama4_pythonic",
        "<|python_start|>[get_weather(city='São \"Paulo\"', days=[1, {'a': \"}]\"}]), get_time()]<|python_end|>",
        "",
        [CALL, TIME],
    ),
    (
        "llama4_pythonic",
        '[f(a=-1.5e3, b=None, c={"x": [True, False]}, d="it\\\'s \\n\\u00e9\\x41", e=[])]',
        "",
        [("f", {"a": -1500.0, "b": None, "c": {"x": [True, False]}, "d": "it's \néA", "e": []})],
    ),
    (
        "llama4_pythonic",
        r"""[f(a='\xzz', b='\x4', c='\u00e', d='\u', e='\q\x4\n')]""",
        "",
        [("f", {"a": r"\xzz", "b": r"\x4", "c": r"\u00e", "d": r"\u", "e": "\\q\\x4\n"})],
    ),
    (
        "lfm2",
        "I look.\n<|tool_call_start|>[get_time()]<|tool_call_end|>",
        "I look.",
        [TIME],
    ),
    (
        "olmo3",
        "I look.\n\n<function_calls>\nget_weather(city='São \"Paulo\"', days=[1, {'a': \"}]\"}])\nget_time()\n"
        "</function_calls>",
        "I look.",
        [CALL, TIME],
    ),
    (
        "olmo3",
        "<function_calls>f(a=null, b=true, c=None)</function_calls>",
        "",
        [("f", {"a": None, "b": True, "c": None})],
    ),
    ("olmo3", "<function_calls>none</function_calls>", "<function_calls>none", []),
    (
        "longcat",
        f'<longcat_tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</longcat_tool_call>',
        "",
        [CALL],
    ),
    (
        "kimi_k2",
        f"I look. {KIMI_ALL}{KIMI_BEGIN}functions.get_weather:0{KIMI_SEP}{WEATHER}{KIMI_END}"
        f"{KIMI_BEGIN}get_time:12 {KIMI_SEP} {{}} {KIMI_END}{KIMI_ALL_END}",
        "I look.",
        [CALL, TIME],
    ),
    ("kimi_k2", f"No.{KIMI_ALL}{KIMI_ALL_END}", "No.", []),
    ("kimi_k2", f"{KIMI_BEGIN}functions.none{KIMI_SEP}{{}}", f"{KIMI_BEGIN}functions.none{KIMI_SEP}{{}}", []),
    *(
        (
            name,
            f'Well:\n\n<｜DSML｜{outer}>\n<｜DSML｜{space}invoke name="get_weather">\n'
            f'<｜DSML｜{space}parameter name="city" string="true">São "Paulo"</｜DSML｜{space}parameter>\n'
            f'<｜DSML｜{space}parameter name="days" string="false">[1, {{"a": "}}]"}}]</｜DSML｜{space}parameter>\n'
            f'</｜DSML｜{space}invoke>\n<｜DSML｜{space}invoke name="get_time">\n</｜DSML｜{space}invoke>\n'
            f"</｜DSML｜{outer}>",
            "Well:",
            [CALL, TIME],
        )
        for name, outer, space in (
            ("deepseek_v32", "function_calls", ""), ("deepseek_v4", "tool_calls", ""), ("deepseek_v41", " calls", " "),
        )
    ),
    (
        "deepseek_v32",
        '<｜DSML｜invoke name="put"><｜DSML｜parameter name="file" string="true">\n 12\n</｜DSML｜parameter>'
        '<｜DSML｜parameter name="n">5</｜DSML｜parameter></｜DSML｜invoke>',
        "",
        [("put", {"file": "\n 12\n", "n": 5})],
    ),
    (
        "gemma4",
        'I look.\n<|tool_call>call:get_weather{city:<|"|>São "Paulo"<|"|>,days:[1,{a:<|"|>}]<|"|>}]}<tool_call|>'
        "<|tool_call>call:get_time{}<tool_call|>",
        "I look.",
        [CALL, TIME],
    ),
    (
        "gemma4",
        '<|tool_call>:f{<|"|>a<|"|>:<|"|>x,y:{<|"|>, b : -1.5 , at:10:30,c:{d:true,e:[],f:{}},g:,h:null}<tool_call|>Hi',
        "Hi",
        [("f", {"a": "x,y:{", "b": -1.5, "at": "10:30", "c": {"d": True, "e": [], "f": {}}, "g": "", "h": None})],
    ),
    ("gemma4", "<|tool_call>none<tool_call|>", "<|tool_call>none<tool_call|>", []),
    (
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>São \"Paulo\"<escape>,days:[1,{a:<escape>}]<escape>}]}"
        "<end_function_call>",
        "",
        [CALL],
    ),
    (
        CHANNELS,
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{WEATHER}<|call|>",
        "",
        [CALL],
    ),
    (
        CHANNELS,
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=get_time json"
        f"<|message|><|call|><|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{WEATHER}",
        "I look.",
        [TIME, CALL],
    ),
    (CHANNELS, f" to=functions.get_weather<|channel|>commentary json<|message|>{WEATHER}<|call|>", "", [CALL]),
    (CHANNELS, "<|channel|>final<|message|>Yes.<|return|>", "Yes.", []),
    (CHANNELS, "<|start|>assistant<|channel|>final Yes", "<|start|>assistant<|channel|>final Yes", []),
    (
        COMMAND,
        f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {WEATHER}}},\n'
        '    {"tool_call_id": "1", "tool_name": "get_time", "parameters": {}}\n]<|END_ACTION|>',
        "",
        [CALL, TIME],
    ),
    (COMMAND, "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", "Yes.", []),
    ("llama4_pythonic", "[link](http://a)", "[link](http://a)", []),
    ("llama4_pythonic", "[1, 2] and", "[1, 2] and", []),
    ("llama4_pythonic", "[see(this)]", "[see(this)]", []),
]  # fmt: skip


def join_parts(parser: OutputParser, chunks: Sequence[str]) -> list[Part]:
    """Return the parts, those of a field joined as a client joins them."""
    parts = [part for chunk in chunks if chunk for part in parser.feed(chunk)]
    joined = list[Part]()
    for field, text in [*parts, *parser.finish()]:
        if joined and joined[-1][0] == field != "tool_call":
            joined[-1] = field, joined[-1][1] + text
        else:
            joined.append((field, text))
    return joined
