"""Tests the processes that compile and follow grammars, as real processes: what they build, and that they may die."""

import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from llguidance import LLMatcher
from tests.engine.chat_model import VOCABULARY, write_tokenizer
from tests.engine.text.local_grammars import Grammars

from conveyor_engine.masks.answers import Answer
from conveyor_engine.masks.client import Masks
from conveyor_engine.masks.verdicts import Verdict, key_of
from conveyor_engine.text.grammar import build_grammar
from conveyor_engine.text.json_grammar import JSON_OPTIONS

END_ID = 0
NUM_ROWS = 4
WAIT_SECONDS = 120.0
SIMPLE = build_grammar("regex", "[ab]+", "form").text
CHAIN = 'start: r0\n{}\nr{}: "y"'
AND = LLMatcher.grammar_from_lark(
    "start: A\nA: " + " & ".join(f"/(?s:.*)[a-z]{{{number}}}(?s:.*)/" for number in range(1, 30))
)


def build_chain(num_rules: int) -> str:
    """A grammar whose compilation recurses once for each rule. The engine's own limits would refuse it earlier."""
    rules = "\n".join(f'r{number}: "x" r{number + 1}' for number in range(num_rules))
    return LLMatcher.grammar_from_lark(CHAIN.format(rules, num_rules))


def build_ambiguous(branches: int) -> str:
    """A grammar whose masks cost the cube of the branches. The engine itself would merge them."""
    items = {"type": "array", "items": {"$ref": "#/$defs/n"}}
    schema = {"$defs": {"n": {"anyOf": [items] * branches + [{"type": "string"}]}}, "$ref": "#/$defs/n"}
    return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masks")
    write_tokenizer(folder)
    return folder


class Client:
    """A client of one set of processes."""

    def __init__(self, tokenizer: Path) -> None:
        self._news = threading.Event()
        self.masks = Masks(tokenizer, VOCABULARY, [END_ID], NUM_ROWS, self._news.set)

    def judge(self, grammar: str) -> Verdict:
        """Wait for the verdict."""
        found: list[Verdict] = []

        def is_judged() -> bool:
            found.extend(filter(None, [self.masks.judge(key_of(grammar), grammar)]))
            return bool(found)

        self.wait(is_judged)
        return found[0]

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition is true."""
        for _ in range(int(WAIT_SECONDS * 20)):
            if condition():
                return
            self._news.wait(0.05)
            self._news.clear()
        raise AssertionError("it does not happen")

    def open(self, grammar: str) -> Answer:
        """Return an answer with its first mask."""
        assert self.judge(grammar) == Verdict("")
        answer = self.masks.follow(grammar)
        answer.open()
        return self.ready(answer)

    def ready(self, answer: Answer) -> Answer:
        """Wait for the answer's mask."""
        self.masks.flush()
        self.wait(lambda: answer.is_ready)
        return answer

    def accept(self, answer: Answer, token_id: int) -> None:
        """Append a token and wait for the next mask."""
        answer.accept(token_id)
        self.ready(answer)

    @property
    def server(self) -> int:
        """The pid of the fork server."""
        process = self.masks._supervisor.process
        assert process is not None
        return process.pid

    @property
    def walker(self) -> int:
        """The pid of the walker, once the last one has started."""
        self.wait(lambda: self.masks._supervisor.has_walker and Path(f"/proc/{self.masks.walker_pid}").exists())
        return self.masks.walker_pid


@pytest.fixture(scope="module")
def client(directory: Path) -> Iterator[Client]:
    started = Client(directory / "tokenizer.json")
    assert started.judge(SIMPLE) == Verdict("")
    yield started
    os.kill(started.server, signal.SIGKILL)


def tokens_of(mask: bytes) -> list[int]:
    return [token_id for token_id in range(VOCABULARY) if mask[token_id // 8] >> token_id % 8 & 1]


@pytest.mark.parametrize("seed", range(3))
def test_masks_and_ends_are_those_of_the_library(client: Client, directory: Path, seed: int) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", None]}}}
    grammar = build_grammar("json", schema, "form").text
    chance, answer = random.Random(seed), client.open(grammar)
    own = Grammars(directory, VOCABULARY, [END_ID]).follow(grammar)
    for _ in range(60):
        assert answer.failure is None
        assert answer.is_complete == own.is_complete
        if own.is_complete:
            break
        mask = own.build_mask()
        assert answer.build_mask() == mask
        token_id = chance.choice([each for each in tokens_of(mask) if each != END_ID])
        own.accept(token_id)
        client.accept(answer, token_id)
    answer.close()


def test_an_answer_that_loses_its_row_goes_on_in_another(client: Client) -> None:
    grammar = build_grammar("choice", ["abc", "abd"], "form").text
    others = [client.open(SIMPLE) for _ in range(NUM_ROWS - 1)]
    answer = client.open(grammar)
    for _ in range(2):
        (token_id,) = tokens_of(answer.build_mask())
        client.accept(answer, token_id)
    mask = answer.build_mask()
    answer.close()
    others.append(client.open(SIMPLE))
    others.pop(0).close()
    answer.open()
    assert client.ready(answer).build_mask() == mask
    for each in (*others, answer):
        each.close()
    assert sorted(client.masks._answers._free_slots) == list(range(NUM_ROWS))


@pytest.mark.parametrize("num_rules", [2_673, 2_675, 2_677, 30_000])
def test_no_chain_of_rules_ends_a_process_that_others_need(client: Client, num_rules: int) -> None:
    """2,673 to 2,677 rules pass in 8 MiB of stack in one process and overflow it in another."""
    answer, server, walker = client.open(SIMPLE), client.server, client.walker
    verdict = client.judge(build_chain(num_rules))
    assert verdict.is_too_costly == (num_rules == 30_000)
    assert bool(verdict.problem) == verdict.is_too_costly
    client.accept(answer, tokens_of(answer.build_mask())[0])
    assert answer.failure is None
    assert (client.server, client.walker) == (server, walker)
    answer.close()


def test_costly_compilations_hold_up_no_other(client: Client) -> None:
    costly = [AND.replace("[a-z]", f"[a-{last}]") for last in "tuvw"]
    assert all(client.masks.judge(key_of(grammar), grammar) is None for grammar in costly)
    assert client.judge(build_grammar("regex", "[cd]+", "form").text) == Verdict("")
    assert any(client.masks.judge(key_of(grammar), grammar) is None for grammar in costly), "they have not ended yet"
    client.masks.cancel(key_of(costly.pop()))
    for grammar in costly:
        verdict = client.judge(grammar)
        assert verdict.is_too_costly
        assert "processor time" in verdict.problem


def test_grammars_that_wait_behind_a_large_one_are_tried(client: Client) -> None:
    """The process that compiled a large one ends, and must not be given the next one."""
    many = [[f"value {number:06} of {name}" for number in range(60_000)] for name in "abcd"]
    grammars = [LLMatcher.grammar_from_json_schema({"enum": values}, overrides=JSON_OPTIONS) for values in many]
    for grammar in grammars:
        assert client.masks.judge(key_of(grammar), grammar) is None
    assert [client.judge(grammar) for grammar in grammars] == [Verdict("")] * 4


def open_ambiguous(client: Client) -> Answer:
    """Return an answer with costly masks: of as many branches as this CPU compiles within the limit."""
    grammars = map(build_ambiguous, (480, 430, 380, 330))
    return client.open(next(each for each in grammars if client.judge(each) == Verdict("")))


def test_an_answer_with_costly_masks_ends_and_others_go_on(client: Client) -> None:
    other, costly = client.open(SIMPLE), open_ambiguous(client)
    costly.accept(TOKENS["["])
    client.masks.flush()
    client.accept(other, tokens_of(other.build_mask())[0])
    client.ready(costly)
    assert costly.failure is not None
    message, is_too_costly = costly.failure
    assert is_too_costly or "exceeds the engine's limits" in message
    assert other.failure is None
    for each in (other, costly):
        each.close()


TOKENS: dict[str, int] = {}


@pytest.fixture(scope="module", autouse=True)
def read_tokens(directory: Path) -> None:
    TOKENS.update(json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"])


@pytest.mark.parametrize("who", ["walker", "server"])
def test_answers_go_on_behind_the_death_of_a_process(client: Client, who: str) -> None:
    answer = client.open(SIMPLE)
    first, second = tokens_of(answer.build_mask())[:2]
    client.accept(answer, first)
    mask = answer.build_mask()
    dead = getattr(client, who)
    os.kill(dead, signal.SIGKILL)
    client.wait(lambda: not Path(f"/proc/{dead}").exists())
    client.accept(answer, second)
    assert answer.failure is None
    assert answer.build_mask() == mask
    assert client.judge(build_grammar("regex", f"[ef]+{who}", "form").text) == Verdict("")
    answer.close()


def test_an_answer_keeps_the_order_of_its_tokens_when_walkers_die(client: Client) -> None:
    """A new walker opens the answer with all tokens, and at once gets the token that follows them."""
    text = "abcabdabe"
    answer = client.open(build_grammar("choice", [text, f"{text}f"], "form").text)
    for letter in text:
        dead = client.walker
        os.kill(dead, signal.SIGKILL)
        client.wait(lambda dead=dead: not Path(f"/proc/{dead}").exists())  # type: ignore[misc]
        assert tokens_of(answer.build_mask()) == [TOKENS[letter]]
        client.accept(answer, TOKENS[letter])
        assert answer.failure is None
    assert tokens_of(answer.build_mask()) == [END_ID, TOKENS["f"]]
    answer.close()


def test_a_mask_that_ends_the_walker_ends_its_own_answer(client: Client) -> None:
    other, deadly = client.open(SIMPLE), open_ambiguous(client)
    deadly.accept(TOKENS["["])
    client.masks.flush()
    client.wait(lambda: deadly.ticket in client.masks._board.list_work() or deadly.is_ready)
    os.kill(client.walker, signal.SIGKILL)
    client.wait(lambda: deadly.failure is not None)
    client.accept(other, tokens_of(other.build_mask())[0])
    assert other.failure is None
    for each in (other, deadly):
        each.close()


def test_without_a_usable_tokenizer_every_grammar_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    broken = Client(tmp_path / "tokenizer.json")
    for grammar in (SIMPLE, AND):
        assert "tokenizer cannot follow" in broken.judge(grammar).problem
