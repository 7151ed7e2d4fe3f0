"""Encodes pictures as PNG. For threads beside an event loop: it takes 20 ms for each million pixels."""


def encode_png(width: int, height: int, pixels: bytes) -> bytes:
    """`pixels`: a byte each of red, green and blue, row after row -> the file."""
    import io

    from PIL import Image  # only where pictures are made: it takes memory

    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), pixels).save(file, "PNG", compress_level=3)
    return file.getvalue()
