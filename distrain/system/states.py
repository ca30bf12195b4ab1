"""States of other libraries' objects, as JSON for a checkpoint. Runs in: anywhere."""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
from typing import Any

import cloudpickle


def encode_state(state: Any) -> dict[str, Any]:
    """Return a state as JSON: as it is, or pickled."""
    with contextlib.suppress(TypeError, ValueError):
        if json.loads(json.dumps(state)) == state:
            return {"json": state}
    return {"pickle": base64.b64encode(cloudpickle.dumps(state)).decode()}


def decode_state(encoded: dict[str, Any]) -> Any:
    """Return the state that :func:`encode_state` was given. Unpickles: it trusts the checkpoint."""
    if "json" in encoded:
        return encoded["json"]
    return pickle.loads(base64.b64decode(encoded["pickle"]))  # noqa: S301 - documented
