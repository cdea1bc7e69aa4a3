"""What the name of a model says, before anything is imported or built."""

import re

from attemper.errors import ParameterError
from attemper.lab.call_syntax import parse_call

LIBRARIES = ("timm", "hf")
FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_][\w.]*")
"""module:function, as Python and entry points write it."""


def is_own(text: str, known: tuple[str, ...] = LIBRARIES) -> bool:
    """Whether a name is that of a function: of a module of somebody's own, or handed over.

    >>> is_own("my_models:small(depth=2)"), is_own("timm:vit_tiny_patch16_224"), is_own("vit-cifar")
    (True, False, False)
    """
    try:
        name = parse_call(text)[0]
    except ParameterError:
        return False
    return FUNCTION.fullmatch(name) is not None and name.partition(":")[0] not in known


def is_pretrained(text: str) -> bool:
    """Whether a model comes with trained weights of a library or a hub.

    >>> is_pretrained("timm:vit_tiny_patch16_224(pretrained=true)"), is_pretrained("hf:google/vit-base-patch16-224")
    (True, True)
    >>> is_pretrained("timm:vit_tiny_patch16_224"), is_pretrained("hf:vit")
    (False, False)
    """
    try:
        name, options = parse_call(text)
    except ParameterError:
        return False
    library, _, rest = name.partition(":")
    return library in LIBRARIES and bool(options.get("pretrained", library == "hf" and "/" in rest))
