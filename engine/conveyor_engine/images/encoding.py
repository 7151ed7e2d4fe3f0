"""Encodes images as PNG. Call it in a thread, not in an event loop: it takes 20 ms for each million pixels."""


def encode_png(width: int, height: int, pixels: bytes) -> bytes:
    """Return the PNG file. `pixels`: one byte each for red, green and blue, row by row."""
    import io

    from PIL import Image  # imported only when needed, because it takes memory

    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), pixels).save(file, "PNG", compress_level=3)
    return file.getvalue()
