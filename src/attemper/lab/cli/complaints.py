"""What a command line says when it cannot do something: a line or a few, never a page."""

import sys

MOST_IN_A_LINE = 2_000
"""Characters. What somebody typed may be longer, and is not what they want to read again."""
MOST_LINES = 60

EXTRAS = {
    **{"timm": "timm", "torchvision": "torchvision", "transformers": "transformers"},
    **{
        "soundfile": "audio",
        "sacrebleu": "text",
        "easy_vqa": "vqa",
        "pycocotools": "detection",
        "torchmetrics": "detection",
        "ray": "ray",
        "optuna": "recommend",
        "webdataset": "stream",
        "datasets": "stream",
    },
    **dict.fromkeys(
        ("accelerate", "psutil", "yaml", "rich", "safetensors", "scipy", "sklearn", "tensorboard", "tyro"), "study"
    ),
}
"""The extra of attemper that brings a module."""


def complain(text: str) -> None:
    """Write to standard error: long lines cut, control characters shown and not obeyed."""
    sys.stdout.flush()
    lines = [_line(line) for line in text.splitlines()] or [""]
    if len(lines) > MOST_LINES:
        lines = [*lines[:MOST_LINES], f"… and {len(lines) - MOST_LINES:,} more lines"]
    message = "attemper: " + "\n".join(lines) + "\n"
    encoding = sys.stderr.encoding or "utf-8"
    sys.stderr.write(message.encode(encoding, "backslashreplace").decode(encoding))


def _line(text: str) -> str:
    cut = text if len(text) <= MOST_IN_A_LINE else f"{text[: MOST_IN_A_LINE - 1]}…"
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in cut)


def missing_module(name: str) -> str:
    """What to say of a package that is not installed."""
    extra = EXTRAS.get(name.partition(".")[0])
    install = name.partition(".")[0] if extra is None else f"'attemper[{extra}]'"
    return f"this needs '{name}', which is not installed: pip install {install}"
