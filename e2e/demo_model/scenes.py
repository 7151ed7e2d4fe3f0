"""Pictures of one or two coloured shapes on a board, and questions about them with answers in words.

A small encoder learns to see shapes in the middle of a patch in a minute, and shapes anywhere in an hour. `demo-see`
learns these pictures. Tests ask it about others.
"""

import random
from dataclasses import dataclass
from typing import Final

from PIL import Image

from e2e.demo_model.shapes import COLOURS, SHAPES, Colour, put_shape

CELLS: Final = 4  # a picture has 4 x 4, and at most one thing in a column
CELL: Final = 24  # pixels of a side
SIDE: Final = CELLS * CELL
THINGS_MAX: Final = 2
_SHIFT: Final = 1.2  # pixels from the middle of a cell, at most
_FILLED: Final = 0.8  # share of the cells of a board
_TILT: Final = 0.15
_SHADE: Final = 25  # how much a colour differs at most from that of its name
_LIGHTEST, _DARKEST = 255, 215  # of a ground
NUMBERS: Final = ("one", "two")
WHAT: Final = ("What is this?", "What do you see?", "What is in the picture?", "Describe the picture.")
HOW_MANY: Final = ("How many shapes are there?", "How many shapes do you see?")
WHERE: Final = ("What is on the {}?", "Which shape is on the {}?")


@dataclass(frozen=True, slots=True)
class Thing:
    """A shape in a picture, and its cell."""

    colour: str
    shape: str
    column: int
    row: int

    def __str__(self) -> str:
        return f"a {self.colour} {self.shape}"


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture, and what is in it from left to right."""

    picture: Image.Image
    things: tuple[Thing, ...]


def draw_scene(draw: random.Random) -> Scene:
    """Return a random picture."""
    columns = sorted(draw.sample(range(CELLS), draw.randint(1, THINGS_MAX)))
    return _paint(tuple(_draw_thing(column, draw.randrange(CELLS), draw) for column in columns), draw)


def draw_board(draw: random.Random) -> Scene:
    """Return a random picture with a thing in most cells, from which an encoder learns more."""
    cells = [(column, row) for column in range(CELLS) for row in range(CELLS) if draw.random() < _FILLED]
    return _paint(tuple(_draw_thing(column, row, draw) for column, row in cells), draw)


def _paint(things: tuple[Thing, ...], draw: random.Random) -> Scene:
    ground = tuple(draw.randint(_DARKEST, _LIGHTEST) for _ in range(3))
    picture = Image.new("RGB", (SIDE, SIDE), ground)
    for thing in things:
        x, y = (CELL * (cell + 0.5) + draw.uniform(-_SHIFT, _SHIFT) for cell in (thing.column, thing.row))
        place = (x, y, draw.uniform(0.38, 0.45) * CELL)
        put_shape(picture, thing.shape, _shade(COLOURS[thing.colour], draw), place, draw.uniform(-_TILT, _TILT))
    return Scene(picture, things)


def _draw_thing(column: int, row: int, draw: random.Random) -> Thing:
    return Thing(draw.choice(list(COLOURS)), draw.choice(SHAPES), column, row)


def _shade(colour: Colour, draw: random.Random) -> Colour:
    red, green, blue = (min(255, max(0, part + draw.randint(-_SHADE, _SHADE))) for part in colour)
    return red, green, blue


def draw_questions(scene: Scene, draw: random.Random) -> list[tuple[str, str]]:
    """Return one question of each kind that fits the picture, with its answer, in random order."""
    things = scene.things
    asked = [(draw.choice(WHAT), describe(things)), (draw.choice(HOW_MANY), NUMBERS[len(things) - 1])]
    if len(things) > 1:
        left, right = (draw.choice(WHERE).format(side) for side in ("left", "right"))
        asked += [(left, str(things[0])), (right, str(things[-1]))]
    draw.shuffle(asked)
    return asked


def describe(things: tuple[Thing, ...]) -> str:
    """Return the things in words, such as `a red circle and a blue star`."""
    return " and ".join(map(str, things))
