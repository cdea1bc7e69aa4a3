"""Small functions that kernels may take over from torch: a method asks here whether they serve, and never imports one.

keys: `serves(x)` says whether keys (B, H, N, e) can be taken, and `runs_on(x)` whether kernels run where a tensor lies;
`blur_keys` and `draw_order` do what Blur and DropKey do to keys. penalties: `reads(out)` and `serves(q, k, heads)` say
whether `output_square` and `logit_squares` can be asked, `passes(x, weight, bias)` whether `squared_linear`
can. softmax: `serves(logits, methods)` says whether `perturbed_softmax` can be. masks: `drops(x)` and `adds(stream,
branch)` say whether `dropped_tokens` and `dropped_branch`, or `dropped_sum`, can be. tokens: `mixes(x)` says whether
`mixed` can be. They are found by name, so that methods and the reference can be read, and run, without any GPU code.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__all__ = ["keys", "masks", "penalties", "softmax", "tokens"]

if TYPE_CHECKING:
    from attemper.kernels import keys, masks, penalties, softmax, tokens
else:
    keys = importlib.import_module("attemper.kernels.keys")
    masks = importlib.import_module("attemper.kernels.masks")
    penalties = importlib.import_module("attemper.kernels.penalties")
    softmax = importlib.import_module("attemper.kernels.softmax")
    tokens = importlib.import_module("attemper.kernels.tokens")
