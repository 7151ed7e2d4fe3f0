"""What the demo's model learns, without training it."""

import pytest

from e2e.demo_model import corpus
from e2e.demo_model.corpus import ANSWER_CHARACTERS_MAX, NAMES, build_topics, prose


def test_every_page_that_is_named_exists_and_is_learnt() -> None:
    assert set(NAMES) <= set(corpus.topics)
    assert [topic.names for topic in build_topics()] == list(NAMES.values())


@pytest.mark.parametrize("topic", build_topics(), ids=lambda topic: topic.names[0])
def test_an_answer_is_prose_of_a_fit_length(topic: corpus.Topic) -> None:
    assert 80 <= len(topic.answer) <= ANSWER_CHARACTERS_MAX
    assert topic.answer[0].isupper() or topic.answer[0] == '"'
    for notation in ("::=", "===", "***", "---", ">>>", "  "):
        assert notation not in topic.answer


def test_headings_grammar_tables_and_code_are_left_out() -> None:
    page = """The "for" statement
*******************

The "for" statement is used to iterate over
the elements of a sequence:

for_stmt ::= "for" target_list "in" starred_list ":" suite

   for x in range(10):
       print(x)

+------------+--------------+
| Operation  | Result       |
+------------+--------------+

Names in the *target list* are not deleted when the loop ends.
"""
    assert prose(page) == [
        'The "for" statement is used to iterate over the elements of a sequence.',
        "Names in the target list are not deleted when the loop ends.",
    ]
