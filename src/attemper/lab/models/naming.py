"""What the name of a model says, before anything is imported or built."""

from attemper.errors import ParameterError
from attemper.lab.call_syntax import LIBRARIES, parse_call


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
