"""The one family of errors that KVLoft raises for what a user can put right."""

from __future__ import annotations


class KVLoftError(ValueError):
    """What can't be served; the message says what was given, what is allowed and what to do."""


class ConfigError(KVLoftError):
    """An option with a wrong name or value."""


class GeometryError(KVLoftError):
    """A geometry that breaks a rule of the format, or that can't be cached."""


class ArenaError(KVLoftError):
    """The shared host mapping can't be had in the size that was asked for."""


class TransferError(KVLoftError):
    """A copy that would leave its page, its slot or its mapping; nothing has been copied."""


class CorruptSlotError(TransferError):
    """Slots that do not hold what was written to them; nothing has been copied."""

    def __init__(self, slots: list[int]) -> None:
        """``slots``: bytes from the arena's start."""
        super().__init__(f"{len(slots)} slots have changed since they were written: {slots[:8]}")
        self.slots = slots


class TraceError(KVLoftError):
    """A request trace that can't be read or made; says where in the file, if it is one."""
