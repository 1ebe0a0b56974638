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
