"""Numbers of things in words."""


def counted(count: int, one: str, many: str | None = None) -> str:
    """So many things. many: what two of them are called, unless it is `one` with an s.

    >>> counted(1, "image"), counted(2000, "image"), counted(2, "box", "boxes")
    ('1 image', '2,000 images', '2 boxes')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"
