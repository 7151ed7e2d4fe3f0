"""openai for Python, with a service that generates images."""

from base64 import b64decode
from io import BytesIO

from checks import MODEL, SHAPES, URL, run
from openai import BadRequestError, NotFoundError, OpenAI
from PIL import Image, ImageChops

client = OpenAI(base_url=URL, api_key="none", max_retries=0)
PNG = b"\x89PNG\r\n\x1a\n"


def paint(**options: object) -> object:
    own = {"seed": 1, "num_inference_steps": 10, **options.pop("extra_body", {})}
    return client.images.generate(**{"model": MODEL, "prompt": "a red star", "extra_body": own, **options})


def read(item: object) -> bytes:
    picture = b64decode(item.b64_json)
    assert picture.startswith(PNG)
    return picture


def generate() -> None:
    answer = paint()
    (item,) = answer.data
    assert read(item) == read(paint().data[0]), "the same seed makes the same picture"
    assert answer.size == paint(size=answer.size).size
    assert answer.usage.input_tokens == answer.usage.total_tokens > 0


def several() -> None:
    """Each picture of one batch is the one made alone. docs/image-generation.md: a colour of each may differ by 1."""
    for seed, item in enumerate(paint(n=2).data, start=1):
        alone = paint(extra_body={"seed": seed}).data[0]
        assert item.seed == alone.seed == seed
        pixels = [Image.open(BytesIO(read(each))).convert("RGB") for each in (item, alone)]
        assert max(high for _, high in ImageChops.difference(*pixels).getextrema()) <= 2


def previews() -> None:
    *partial, done = paint(stream=True, partial_images=3)
    assert [event.type for event in partial] == ["image_generation.partial_image"] * 3
    assert [event.partial_image_index for event in partial] == [0, 1, 2]
    assert done.type == "image_generation.completed"
    assert len({read(event) for event in (*partial, done)}) == 4
    assert read(done) == read(paint().data[0])


def edit(**options: object) -> object:
    picture = BytesIO(b64decode(SHAPES))
    picture.name = "shapes.png"
    own = {"seed": 1, "num_inference_steps": 10, "strength": 0.5}
    return client.images.edit(
        **{"model": MODEL, "image": picture, "prompt": "a red star", "size": "32x32", "extra_body": own, **options}
    )


def edits() -> None:
    answer = edit()
    (item,) = answer.data
    assert answer.size == "32x32"
    assert read(item) == read(edit().data[0]) != read(paint(size="32x32").data[0])
    *partial, done = edit(stream=True, partial_images=2)
    assert [event.type for event in partial] == ["image_edit.partial_image"] * 2
    assert done.type == "image_edit.completed"
    assert read(done) == read(item)


def errors() -> None:
    for call, wrong, kind in (
        (paint, {"model": "no-such"}, NotFoundError),
        (paint, {"size": "33x32"}, BadRequestError),
        (edit, {"mask": ("mask.png", b64decode(SHAPES))}, BadRequestError),
    ):
        try:
            call(**wrong)
        except kind as error:
            named = error.param
        else:
            named = "nothing: it was accepted"
        assert named in wrong, named


run(generate, several, previews, edits, errors)
