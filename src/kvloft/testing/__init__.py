"""For tests of KVLoft and of what plugs into it: a reference engine, an oracle, an auditor.

:mod:`kvloft.testing.geometries` has strategies for hypothesis, which only tests need to install.
"""

from kvloft.testing import audit, oracle
from kvloft.testing.audit import AuditError
from kvloft.testing.engine import Engine, EngineError, Request
from kvloft.testing.pages import PAGES_LAYOUTS, Pages, PagesLayout

__all__ = [
    "PAGES_LAYOUTS",
    "AuditError",
    "Engine",
    "EngineError",
    "Pages",
    "PagesLayout",
    "Request",
    "audit",
    "oracle",
]
