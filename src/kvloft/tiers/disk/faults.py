"""System errors of a disk, by name and with what to do about them."""

from __future__ import annotations

import errno

from kvloft.faults import Faults

_ADVICE = {
    "EIO": "The device or its connection fails; check the system's log",
    "EROFS": "The file system has become read-only; check the system's log",
    "EACCES": "The permissions have changed",
    "ENOSPC": "Make space, or lower max_bytes",
    "EDQUOT": "The quota is used up: have it raised, or lower max_bytes",
    "ESTALE": "The network file system has lost the directory; mount it again",
}


def cause_of(error: OSError) -> str:
    """The name of a system error, ``EIO`` and so on."""
    return errno.errorcode.get(error.errno or 0, "EIO")


class DiskFaults(Faults):
    """Faults of a disk."""

    def add_error(self, doing: str, where: object, error: OSError) -> None:
        """One more fault, from a system call that has failed."""
        cause = cause_of(error)
        advice = _ADVICE.get(cause, "Check the file system")
        self.add(cause, f"{doing} {where} has failed: {error.strerror or error}. {advice}")
