"""Tests /classify and /predict on a real server against the labels and scores of transformers' pipeline."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from tests.engine.classifiers import LABELS, open_tokenizer, write_served_classifier
from tests.engine.processes import EngineServer, error_of
from tests.engine.receipts import ASKED, check_receipt, check_sum
from tests.engine.serving.http.other_tasks import list_paths
from transformers import TextClassificationPipeline, TokenClassificationPipeline

from conveyor_api.endpoints import ENDPOINTS
from conveyor_protocol.request_headers import USAGE_HEADER

CONTEXT_TOKENS = 512
TEXTS = ["the fox", "naïve café", "x", "the quick brown fox jumps over the lazy dog", "the fox"]
PATHS = [endpoint.path for endpoint in ENDPOINTS if endpoint.models == "classifies"]
BODIES: dict[str, dict[str, Any]] = {"/classify": {"input": TEXTS}, "/predict": {"inputs": [[text] for text in TEXTS]}}
NAMED: dict[str, Any] = {"num_labels": 3, "id2label": dict(enumerate(LABELS))}
KINDS: dict[str, dict[str, Any]] = {
    "one of several": NAMED,
    "several at once": NAMED | {"problem_type": "multi_label_classification"},
    "a number": {"num_labels": 1, "problem_type": "regression"},
}


class Served:
    """A server of a tiny classifier, and transformers' pipeline."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        model = write_served_classifier("bert", folder / "tiny", **changes)
        self.tokenizer = open_tokenizer(folder / "tiny")
        self.pipeline = TextClassificationPipeline(model=model, tokenizer=self.tokenizer, device="cpu")
        self.server = EngineServer(folder / "server", folder / "tiny", task="classify", max_num_seqs=4)

    def expect(self, text: Any, **how: Any) -> list[dict[str, Any]]:
        """Return all labels with their scores, best first."""
        found: list[dict[str, Any]] = self.pipeline(text, top_k=None, **how)
        return found


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    one = Served(tmp_path_factory.mktemp("classifier"), **KINDS[request.param])
    with one.server as server:
        server.wait_ready()
        yield one


@pytest.fixture(scope="module")
def labels_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    one = Served(tmp_path_factory.mktemp("classifier"), **NAMED)
    with one.server as server:
        server.wait_ready()
        yield one


def post(served: Served, path: str, **more: Any) -> Any:
    answer = served.server.post(path, BODIES[path] | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [one["label"] for one in found] == [one["label"] for one in expected]
    assert [one["score"] for one in found] == pytest.approx([one["score"] for one in expected], abs=1e-4)


def test_a_conversation_gets_the_labels_of_its_text(labels_one: Served) -> None:
    messages = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "x"}]
    answer = labels_one.server.post("/classify", {"messages": messages}).json()
    text = "<|user|>the fox<|end|><|assistant|>x<|end|>"
    expected = labels_one.expect(text, add_special_tokens=False)
    scores = {one["label"]: one["score"] for one in expected}
    assert answer["data"][0]["probs"] == pytest.approx([scores[label] for label in LABELS], abs=1e-4)
    num_tokens = len(labels_one.tokenizer(text, add_special_tokens=False)["input_ids"])
    assert answer["usage"]["prompt_tokens"] == num_tokens
    begun = labels_one.server.post("/classify", {"messages": messages, "add_generation_prompt": True}).json()
    assert begun["usage"]["prompt_tokens"] == num_tokens + 1


@pytest.mark.slow
def test_texts_get_the_labels_of_the_pipeline(served: Served) -> None:
    answer = post(served, "/classify", model="tiny")
    labels = [served.pipeline.model.config.id2label[index] for index in range(served.pipeline.model.config.num_labels)]
    for number, (one, text) in enumerate(zip(answer["data"], TEXTS, strict=True)):
        expected = served.expect(text)
        found = [{"label": label, "score": score} for label, score in zip(labels, one["probs"], strict=True)]
        assert_same(sorted(found, key=lambda each: -each["score"]), expected)
        assert (one["index"], one["label"], one["num_classes"]) == (number, expected[0]["label"], len(labels))
    num_tokens = sum(len(served.tokenizer(text)["input_ids"]) for text in TEXTS)
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert (answer["object"], answer["model"]) == ("list", "tiny")


def test_the_shape_of_text_embeddings_inference_has_all_labels_best_first(served: Served) -> None:
    for found, text in zip(post(served, "/predict"), TEXTS, strict=True):
        assert_same(found, served.expect(text))
    assert_same(post(served, "/predict", inputs=TEXTS[0]), served.expect(TEXTS[0]))


def test_a_pair_of_texts_is_one_input(labels_one: Served) -> None:
    expected = labels_one.expect({"text": "the fox", "text_pair": "x"})
    assert_same(post(labels_one, "/predict", inputs=["the fox", "x"]), expected)
    found = post(labels_one, "/predict", inputs=[["the fox", "x"], ["x"]])
    assert_same(found[0], expected)
    assert_same(found[1], labels_one.expect("x"))


def test_logits_come_if_requested(labels_one: Served) -> None:
    expected = labels_one.expect("the fox", function_to_apply="none")
    assert_same(post(labels_one, "/predict", inputs="the fox", raw_scores=True), expected)
    raw = post(labels_one, "/classify", input="the fox", use_activation=False)["data"][0]
    assert sorted(raw["probs"], reverse=True) == pytest.approx([one["score"] for one in expected], abs=1e-4)


def test_every_form_of_input_gives_the_same(labels_one: Served) -> None:
    ids = labels_one.tokenizer("the fox")["input_ids"]
    forms: list[Any] = ["the fox", ["the fox"], ids, [ids]]
    answers = [post(labels_one, "/classify", input=form)["data"][0]["probs"] for form in forms]
    for probs in answers:
        assert probs == pytest.approx(answers[0], abs=1e-6)


def test_a_text_that_is_too_long_is_cut_or_refused_as_the_request_says(labels_one: Served) -> None:
    long = "the lazy dog " * 400
    for path, body in (("/classify", {"input": long}), ("/predict", {"inputs": long})):
        error = error_of(labels_one.server.post(path, body))
        assert (error["code"], error["param"]) == ("context_length_exceeded", next(iter(body)))
    expected = labels_one.expect(long, truncation=True, max_length=CONTEXT_TOKENS)
    assert_same(post(labels_one, "/predict", inputs=long, truncate=True), expected)
    cut = post(labels_one, "/classify", input=long, truncate_prompt_tokens=-1)
    assert cut["data"][0]["label"] == expected[0]["label"]
    assert cut["usage"]["prompt_tokens"] == CONTEXT_TOKENS


def test_batches_fill_up_unless_another_mode_is_set(labels_one: Served) -> None:
    post(labels_one, "/classify", input=["the fox"] * 4)
    assert "conveyor_engine_batch_close_total{" in labels_one.server.get("/metrics").text


def test_a_gateway_gets_the_number_of_used_tokens(labels_one: Served) -> None:
    answer = labels_one.server.post("/classify", BODIES["/classify"], **{USAGE_HEADER: "classified"})
    used = {"prompt_tokens": answer.json()["usage"]["prompt_tokens"], "cached_tokens": 0, "completion_tokens": 0}
    assert used.items() <= json.loads(answer.headers[USAGE_HEADER]).items()


REFUSED: tuple[tuple[str, dict[str, Any], str, str], ...] = (
    ("/classify", {"input": []}, "invalid_value", "input"),
    ("/classify", {"input": None}, "invalid_value", "input"),
    ("/classify", {"input": ["a", ""]}, "invalid_value", "input"),
    ("/classify", {"input": ["a"] * 10_000}, "invalid_value", "input"),
    ("/classify", {"input": [384]}, "invalid_value", "input"),
    ("/classify", {"messages": []}, "invalid_value", "messages"),
    ("/classify", {"model": "other"}, "model_not_found", "model"),
    ("/predict", {"inputs": []}, "invalid_value", "inputs"),
    ("/predict", {"inputs": None}, "invalid_value", "inputs"),
    ("/predict", {"inputs": ""}, "invalid_value", "inputs"),
    ("/predict", {"inputs": ["a", "b", "c"]}, "invalid_value", "inputs"),
    ("/predict", {"inputs": [["a"], "b"]}, "invalid_value", "inputs"),
    ("/predict", {"inputs": [["a"]] * 9000}, "invalid_value", "inputs"),
    ("/predict", {"truncate": "yes"}, "invalid_value", "truncate"),
)


@pytest.mark.parametrize(("path", "changes", "code", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_classified_is_refused_by_name(
    labels_one: Served, path: str, changes: dict[str, Any], code: str, param: str
) -> None:
    answer = labels_one.server.post(path, BODIES[path] | changes)
    error = error_of(answer)
    refusal = (answer.status_code, error["code"], error["param"])
    assert refusal == (404 if code == "model_not_found" else 400, code, param), error["message"]
    assert len(answer.content) < 1000


def test_text_that_is_no_unicode_is_replaced(labels_one: Served) -> None:
    answers = [labels_one.server.post("/predict", b'{"inputs": "\\u%s"}' % code) for code in (b"d800", b"fffd")]
    assert answers[0].status_code == 200
    assert answers[0].json() == answers[1].json()


@pytest.mark.parametrize("path", PATHS)
def test_answers_and_errors_are_as_the_document_says(labels_one: Served, path: str) -> None:
    document = labels_one.server.get("/openapi.json").json()
    post_of = document["paths"][path]["post"]
    single = {"/classify": {"input": "a"}, "/predict": {"inputs": "a"}}[path]
    for more, status in (({}, 200), (single, 200), ({"model": "other"}, 404), ({"model": 7}, 400)):
        answer = labels_one.server.post(path, BODIES[path] | more)
        assert answer.status_code == status
        schema = post_of["responses"][str(status)]["content"]["application/json"]["schema"]
        Draft202012Validator(schema | {"components": document["components"]}).validate(answer.json())


@pytest.mark.parametrize("path", list_paths("classifies"))
def test_an_engine_that_classifies_does_nothing_else(labels_one: Served, path: str) -> None:
    answer = labels_one.server.post(path, {"prompt": "a"})
    assert (answer.status_code, error_of(answer)["code"]) == (400, "wrong_task")
    assert error_of(answer)["message"].endswith("it answers /classify, /predict, /tokenize, /detokenize and /decode")


@pytest.mark.parametrize("path", PATHS)
def test_an_engine_that_generates_classifies_nothing(server: EngineServer, path: str) -> None:
    answer = server.post(path, BODIES[path])
    assert (answer.status_code, error_of(answer)["code"]) == (400, "wrong_task")
    assert "classifies no texts" in error_of(answer)["message"]


TOKEN_LABELS = ("O", "B-animal", "I-animal", "B-place", "I-place")


def test_the_labels_are_described(served: Served) -> None:
    info, labels = served.server.get("/info").json()["model_type"]["classifier"], served.pipeline.model.config.id2label
    assert info["id2label"] == {str(index): label for index, label in labels.items()}
    assert info["label2id"] == {label: index for index, label in labels.items()}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineServer, TokenClassificationPipeline]]:
    folder = tmp_path_factory.mktemp("tokens")
    labels = dict(enumerate(TOKEN_LABELS))
    model = write_served_classifier("bert", folder / "tiny", 5, per_token=True, id2label=labels)
    pipeline = TokenClassificationPipeline(model=model, tokenizer=open_tokenizer(folder / "tiny"), device="cpu")
    with EngineServer(folder / "server", folder / "tiny", max_num_seqs=4) as server:
        yield server.wait_ready(), pipeline


def test_tokens_get_the_labels_of_the_pipeline(tokens: tuple[EngineServer, TokenClassificationPipeline]) -> None:
    server, pipeline = tokens
    answer = server.post("/classify", {"input": TEXTS}).json()
    assert [one["index"] for one in answer["data"]] == list(range(len(TEXTS)))
    found = 0
    for one, text in zip(answer["data"], TEXTS, strict=True):
        expected = pipeline(text)
        scores = [entity.pop("score") for entity in one["entities"]]
        assert scores == pytest.approx([float(entity.pop("score")) for entity in expected], abs=1e-4)
        assert one["entities"] == expected
        found += len(expected)
    assert found > 3
    assert answer["usage"]["prompt_tokens"] == sum(len(pipeline.tokenizer(text)["input_ids"]) for text in TEXTS)


def test_texts_whose_tokens_are_labelled_are_cut_at_their_end(
    tokens: tuple[EngineServer, TokenClassificationPipeline],
) -> None:
    server, pipeline = tokens
    long = "naïve fox " * 400
    cut = server.post("/classify", {"input": long, "truncate_prompt_tokens": -1}).json()["data"][0]["entities"]
    expected = pipeline(long)  # which cuts by itself
    assert [(one["index"], one["entity"], one["start"], one["end"]) for one in cut] == [
        (one["index"], one["entity"], one["start"], one["end"]) for one in expected
    ]
    refused = server.post("/classify", {"input": long}).json()["error"]
    assert refused["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("/classify", {"input": [7, 8]}, "invalid_value", "input"),
        (
            "/classify",
            {"input": "a", "truncate_prompt_tokens": 5, "truncation_side": "left"},
            "invalid_value",
            "truncation_side",
        ),
        ("/predict", {"inputs": "a"}, "wrong_task", None),
    ],
)
def test_what_has_no_tokens_to_label_is_refused(
    tokens: tuple[EngineServer, TokenClassificationPipeline], path: str, body: dict[str, Any], code: str, param: str
) -> None:
    error = error_of(tokens[0].post(path, body))
    assert (error["code"], error["param"]) == (code, param), error["message"]


def test_the_answer_with_labelled_tokens_is_as_the_document_says(
    tokens: tuple[EngineServer, TokenClassificationPipeline],
) -> None:
    server, _ = tokens
    document = server.get("/openapi.json").json()
    schema = document["paths"]["/classify"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    validator = Draft202012Validator(schema | {"components": document["components"]})
    for raw in (True, False):
        validator.validate(server.post("/classify", {"input": TEXTS, "use_activation": raw}).json())


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_has_its_receipt(labels_one: Served, path: str) -> None:
    answer = labels_one.server.post(path, BODIES[path], **ASKED)
    header = answer.headers.get("x-receipt")
    check_receipt(json.loads(header) if header else answer.json()["usage"]["receipt"])


def test_the_receipts_of_requests_are_the_time_of_all_steps(labels_one: Served) -> None:
    def run(_: int, headers: Mapping[str, str]) -> None:
        answer = labels_one.server.post("/classify", BODIES["/classify"], **headers)
        assert answer.status_code == 200, answer.text

    check_sum(labels_one.server, 4, run)
