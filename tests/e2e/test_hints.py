"""Hints on the real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import run_script
from tests.e2e.hint_scenarios import CHUNK, TOKENS
from tests.e2e.test_engine import at_rest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
WHOLE = (TOKENS - 1) // CHUNK * CHUNK


def test_hints_are_heeded_and_wrong_ones_do_no_harm(cache: Path) -> None:
    result = run_script("hint_scenarios.py", "hints", cache, environment={}, timeout=240)
    assert result["tokens_per_chunk"] == CHUNK
    assert result["do_not_store"] == {"restored": 0, "stored": 0, "ignored": 0}
    assert result["stored"]["restored"] == 0
    assert result["stored"]["stored"] >= WHOLE // CHUNK
    assert result["do_not_load"]["restored"] == 0
    assert result["restored"]["restored"] == WHOLE
    assert result["max_load_tokens_0"]["restored"] == 0
    assert 0 < result["max_offload_tokens"]["stored"] < result["stored"]["stored"]
    assert result["after_max_offload_tokens"] == {"restored": 2 * CHUNK, "stored": 0, "ignored": 0}
    assert result["max_load_tokens"]["restored"] == 2 * CHUNK
    assert result["wrong"] == {"restored": WHOLE, "stored": 0, "ignored": 6}
    assert result["somebody_elses"] == {"restored": WHOLE, "stored": 0, "ignored": 0}
    assert result["loading"]
    assert result["held"] == 1
    assert result["pinned"]["restored"] == WHOLE
    assert result["loose"]["restored"] == 0
    assert result["agree"] == [True, True]
    assert at_rest(result)
