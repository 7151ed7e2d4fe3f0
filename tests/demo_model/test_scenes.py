"""Questions about pictures of shapes have one right answer each."""

import random
from itertools import pairwise

from e2e.demo_model.scenes import NUMBERS, Thing, describe, draw_questions, draw_scene


def test_things_are_named_from_left_to_right() -> None:
    draw = random.Random("scenes")
    for _ in range(200):
        assert all(left.column < right.column for left, right in pairwise(draw_scene(draw).things))


def test_the_answers_say_what_is_in_the_picture() -> None:
    draw = random.Random("scenes")
    for _ in range(200):
        scene = draw_scene(draw)
        answers = dict(draw_questions(scene, draw))
        for question, answer in answers.items():
            if question.startswith("How many"):
                assert answer == NUMBERS[len(scene.things) - 1]
            elif "left" in question:
                assert answer == str(scene.things[0])
            elif "right" in question:
                assert answer == str(scene.things[-1])
            else:
                assert answer == describe(scene.things)


def test_things_are_joined_as_in_a_sentence() -> None:
    red, blue = (Thing(colour, shape, 0, 0) for colour, shape in (("red", "star"), ("blue", "square")))
    assert describe((red,)) == "a red star"
    assert describe((red, blue)) == "a red star and a blue square"
