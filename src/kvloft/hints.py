"""What a request may say about its own cache, in vLLM's ``kv_transfer_params``.

A wrong hint must never fail a request: it is ignored and told. Keys that are not known may be
somebody else's, and are left alone.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

MAX_PRIORITY = 2
MAX_PIN_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class Hints:
    """The hints of one request; the field's name is the key."""

    do_not_store: bool = False
    do_not_load: bool = False
    max_load_tokens: int | None = None
    """Tokens to restore at most, beyond what the engine has itself; as in vLLM's own offloading."""
    max_offload_tokens: int | None = None
    """Tokens up to which to store; as in vLLM's own offloading."""
    priority: int = 0
    """-2 to 2: each step up, what the request stores and uses counts four times as much."""
    pin_seconds: float = 0.0
    """How long after the request's end its prefix must stay in host memory."""

    @property
    def factor(self) -> float:
        """By how much its entries are worth more than others'."""
        return 4.0**self.priority


NO_HINTS = Hints()


def _truth(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _tokens(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _priority(value: Any) -> int | None:
    return value if type(value) is int and abs(value) <= MAX_PRIORITY else None


def _seconds(value: Any) -> float | None:
    # Neither NaN nor an integer beyond all floats passes the comparison, or fails in it.
    right = type(value) in (int, float) and 0 <= value <= MAX_PIN_SECONDS
    return float(value) if right else None


_CHECKS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "do_not_store": (_truth, "true or false"),
    "do_not_load": (_truth, "true or false"),
    "max_load_tokens": (_tokens, "a whole number of tokens, 0 or more"),
    "max_offload_tokens": (_tokens, "a whole number of tokens, 0 or more"),
    "priority": (_priority, f"a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}"),
    "pin_seconds": (_seconds, f"a number from 0 to {MAX_PIN_SECONDS:.0f}"),
}
KEYS = tuple(field.name for field in fields(Hints))


_SHORT = reprlib.Repr()
_MAX_SHOWN = 60


def _shown(value: Any) -> str:
    """A value for a message: short, whatever it is, and without failing."""
    try:
        shown = _SHORT.repr(value)
    except Exception:  # e.g. an integer with too many digits to be printed
        return f"a value of type {type(value).__name__:.{_MAX_SHOWN}} that can't be shown"
    return shown if len(shown) <= _MAX_SHOWN else shown[: _MAX_SHOWN - 3] + "..."


def parse_hints(params: object) -> tuple[Hints, list[str]]:
    """The hints in ``kv_transfer_params``, and what is wrong with those that are ignored.

    ``None`` values are as good as none. Never raises.
    """
    if not isinstance(params, Mapping):
        return NO_HINTS, []
    known: dict[str, Any] = {}
    complaints = []
    for key in KEYS:
        try:
            value = params.get(key)
        except Exception:  # not a plain dictionary, then
            complaints.append(f"kv_transfer_params[{key!r}] can't be read; write a dictionary")
            continue
        if value is None:
            continue
        check, allowed = _CHECKS[key]
        found = check(value)
        if found is None:
            complaints.append(f"kv_transfer_params[{key!r}] is {_shown(value)}; write {allowed}")
        else:
            known[key] = found
    return (Hints(**known) if known else NO_HINTS), complaints
