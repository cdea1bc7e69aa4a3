"""A digest inside of a result, so that a file that was cut or edited is not taken for one."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from attemper.lab.training.spec import canonical

DIGEST = "digest"


def with_digest(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result with a digest of everything else in it.

    >>> found = with_digest({"test": {"accuracy": 0.9}})
    >>> digest_fits(found), digest_fits({**found, "test": {"accuracy": 0.99}})
    (True, False)
    """
    return {**result, DIGEST: _digest(result)}


def digest_fits(result: Mapping[str, Any]) -> bool:
    """Whether a result is as it was when its digest was made."""
    try:
        return bool(result.get(DIGEST) == _digest(result))
    except ValueError:  # a number such as 1e999, which we never write
        return False


def _digest(result: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps({name: value for name, value in result.items() if name != DIGEST}))
    return hashlib.sha256(canonical(plain).encode()).hexdigest()
