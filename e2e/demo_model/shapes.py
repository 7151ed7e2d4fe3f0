"""Pictures of shapes: what `demo-image`, `demo-clip` and `demo-paint` learn. `scenes` puts several into one picture."""

import random
from math import cos, pi, sin
from typing import Final

from PIL import Image, ImageDraw

SHAPES: Final = ("circle", "square", "triangle", "star")
SIDE: Final = 64
Colour = tuple[int, int, int]
COLOURS: Final[dict[str, Colour]] = {
    "red": (200, 30, 30),
    "green": (30, 160, 50),
    "blue": (40, 70, 210),
    "black": (20, 20, 20),
}
WHITE: Final[Colour] = (255, 255, 255)


def draw_shape(shape: str, draw: random.Random) -> Image.Image:
    """The shape in one colour, of some size, somewhere on another colour."""
    colour, ground = _draw_colour(draw), _draw_colour(draw)
    while sum(abs(a - b) for a, b in zip(colour, ground, strict=True)) < 200:
        ground = _draw_colour(draw)
    return paint_shape(shape, colour, ground, draw)


def _draw_colour(draw: random.Random) -> Colour:
    return draw.randrange(256), draw.randrange(256), draw.randrange(256)


def paint_shape(shape: str, colour: Colour, ground: Colour, draw: random.Random) -> Image.Image:
    """The shape, of some size, somewhere."""
    image = Image.new("RGB", (SIDE, SIDE), ground)
    size = draw.uniform(0.22, 0.4) * SIDE
    x, y = (draw.uniform(size, SIDE - size) for _ in range(2))
    put_shape(image, shape, colour, (x, y, size), draw.uniform(-0.4, 0.4))
    return image


def put_shape(image: Image.Image, shape: str, colour: Colour, place: tuple[float, float, float], tilt: float) -> None:
    """Draw the shape into the image. `place`: x and y of its centre, and the pixels to its corners. `tilt`: radians."""
    x, y, size = place
    turn = tilt - pi / 2
    pencil = ImageDraw.Draw(image)
    match shape:
        case "circle":
            pencil.ellipse((x - size, y - size, x + size, y + size), fill=colour)
        case "square":
            pencil.polygon(_find_corners(x, y, turn + pi / 4, [size] * 4), fill=colour)
        case "triangle":
            pencil.polygon(_find_corners(x, y, turn, [size] * 3), fill=colour)
        case _:
            pencil.polygon(_find_corners(x, y, turn, [size, size * 0.4] * 5), fill=colour)


def _find_corners(x: float, y: float, turn: float, radii: list[float]) -> list[tuple[float, float]]:
    angles = [turn + 2 * pi * number / len(radii) for number in range(len(radii))]
    return [(x + r * cos(angle), y + r * sin(angle)) for r, angle in zip(radii, angles, strict=True)]
