"""Documentation pages into questions and answers in plain paragraphs. Pure; called by `train`."""

import re
from dataclasses import dataclass
from pydoc_data.topics import topics

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"

QUESTIONS = (
    "Tell me about {}.",
    "Tell me about {}",
    "What is {}?",
    "What are {}?",
    "Explain {}.",
    "Explain {} in Python.",
    "Tell me about {} in Python.",
    "How do I use {}?",
    "How does {} work?",
    "What does {} do?",
    "Describe {}.",
    "What do you know about {}?",
    "{}",
)
# The pages that the model learns, and what people call their subjects.
NAMES = {
    "lists": ("lists", "a list", "list displays", "the list"),
    "dict": ("dictionaries", "a dictionary", "dicts", "dict"),
    "function": ("functions", "a function", "function definitions", "def"),
    "class": ("classes", "a class", "class definitions"),
    "for": ("the for statement", "for loops", "a for loop", "loops", "for"),
    "while": ("the while statement", "while loops", "a while loop", "while"),
    "if": ("the if statement", "if", "conditions"),
    "with": ("the with statement", "with", "context managers"),
    "try": ("the try statement", "try and except", "error handling", "try"),
    "import": ("the import statement", "imports", "import", "importing modules"),
    "raise": ("the raise statement", "raise", "raising exceptions"),
    "exceptions": ("exceptions", "an exception", "errors"),
    "strings": ("strings", "a string", "string literals"),
    "string-methods": ("string methods", "the methods of strings"),
    "typesseq": ("tuples", "a tuple", "sequences", "range", "sequence types"),
    "typesmapping": ("mappings", "mapping types", "the methods of dictionaries"),
    "typesmodules": ("modules", "a module"),
    "break": ("break", "the break statement"),
    "continue": ("continue", "the continue statement"),
    "del": ("del", "the del statement"),
    "global": ("global", "the global statement", "global variables"),
    "in": ("in", "membership tests", "the in operator"),
    "calls": ("calls", "calling a function", "arguments"),
    "truth": ("truth values", "truth value testing", "truth"),
    "lambda": ("lambda", "lambdas", "a lambda"),
    "async": ("async", "coroutines", "async functions", "await"),
    "yield": ("yield", "generators", "the yield statement"),
    "integers": ("integers", "integer literals", "an integer"),
    "numbers": ("numbers", "numeric literals"),
    "booleans": ("booleans", "boolean operations", "and and or"),
    "assignment": ("assignment", "assignment statements", "variables"),
    "objects": ("objects", "an object", "values and types"),
    "types": ("types", "the standard types", "the type hierarchy"),
    "debugger": ("the debugger", "pdb", "debugging"),
    "slicings": ("slicing", "slices", "a slice"),
    "comparisons": ("comparisons", "comparison", "equality"),
    "return": ("return", "the return statement"),
    "pass": ("pass", "the pass statement"),
    "assert": ("assert", "the assert statement", "assertions"),
    "execmodel": ("the execution model", "execution", "Python"),
    "formatstrings": ("format strings", "string formatting", "formatting"),
}
# What a few pages are about, for the models that know little more.
SUBJECTS = {
    "lists": "lists", "dict": "dictionaries", "function": "functions", "class": "classes", "for": "loops",
    "try": "exceptions", "strings": "strings", "import": "modules",
}  # fmt: skip
ANSWER_CHARACTERS_MAX = 420


@dataclass(frozen=True, slots=True)
class Topic:
    """What may be asked about it, and the one answer."""

    names: tuple[str, ...]
    answer: str


def build_topics() -> list[Topic]:
    """Each page's beginning as an answer."""
    known = (key for key in NAMES if key in topics)  # Pythons differ a little
    return [Topic(NAMES[key], _beginning(prose(topics[key]))) for key in known]


def question_text(name: str, question: str) -> str:
    """What the chat template writes before the answer."""
    return f"{USER}{question.format(name)}{END}{ASSISTANT}"


def answer_text(topic: Topic) -> str:
    """What follows."""
    return f"{topic.answer}{END}"


def prose(page: str) -> list[str]:
    """The paragraphs of a page, each on one line; headings, grammar, tables and code left out."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", page):
        lines = block.strip("\n").split("\n")
        if len(lines) > 1 and re.fullmatch(r"[*=\-~^\"]{3,}", lines[1]):
            continue
        text = re.sub(r"(?<=\w)- (?=\w)", "-", " ".join(line.strip() for line in lines))
        is_code = block.startswith("   ") and not re.match(r" {3}\*? ?[A-Z][^=(]*[a-z] [a-z]+ ", block)
        if is_code or "::=" in text or re.match(r"[+|>=]", text) or len(text) < 25:
            continue
        text = re.sub(r" {2,}", " ", text).replace("*", "")
        paragraphs.append(re.sub(r":$", ".", text))  # the code that the colon announced is gone
    return paragraphs


def _beginning(paragraphs: list[str]) -> str:
    """As many whole paragraphs as an answer should have, at least one."""
    answer = paragraphs[0][:ANSWER_CHARACTERS_MAX]
    for paragraph in paragraphs[1:]:
        if len(answer) + len(paragraph) > ANSWER_CHARACTERS_MAX:
            break
        answer += "\n\n" + paragraph
    return answer
