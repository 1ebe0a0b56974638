"""What ``kvloft demo`` makes of the results of its trials."""

from __future__ import annotations

from typing import Any

from kvloft.cli.demo import passed, remarks, restart_remarks, survived


def result(**changes: Any) -> dict[str, Any]:
    """A trial's result in which all is well."""
    fine = {"agrees": True, "tolerance": 0.1, "max_difference": 0.02, "flips": []}
    restored = {"comparison": fine | changes.pop("comparison", {}), "restored_tokens": 512}
    return {
        "shape": "gemma4",
        "passes": {
            "cold": {"comparison": None, "restored_tokens": 0},
            "engine": {"comparison": fine, "restored_tokens": 0},
            "restored": restored | changes,
        },
    }


def test_agreement_with_hits_passes() -> None:
    assert passed(result())
    assert not list(remarks(result()))


def test_a_mismatch_fails_and_is_said() -> None:
    wrong = result(comparison={"agrees": False, "max_difference": 3.0})
    assert not passed(wrong)
    assert "differ by 3.00" in " ".join(remarks(wrong))


def test_no_hits_fail() -> None:
    nothing = result(restored_tokens=0)
    assert not passed(nothing)
    assert "nothing was restored" in " ".join(remarks(nothing))


def test_an_engine_that_ends_fails() -> None:
    ended = {"shape": "gemma4", "failure": "the engine's process ended with 1"}
    assert not passed(ended)
    assert list(remarks(ended)) == ["gemma4: the engine's process ended with 1"]


def restart(**changes: Any) -> dict[str, Any]:
    """A restart in which all is well."""
    fine = {"agrees": True} | changes.pop("comparison", {})
    restarted = {"comparison": fine, "restored_tokens": 512} | changes
    return {"shape": "gemma4", "passes": {"cold": {}, "restarted": restarted}}


def test_a_restart_that_restores_the_same_answers_survives() -> None:
    assert survived(restart())
    assert not list(restart_remarks(restart()))


def test_a_restart_without_hits_or_with_other_answers_fails() -> None:
    for wrong, word in (
        (restart(restored_tokens=0), "nothing was restored from disk"),
        (restart(comparison={"agrees": False}), "differ"),
        ({"shape": "gemma4", "failure": "ended by signal 9"}, "signal 9"),
    ):
        assert not survived(wrong)
        assert word in " ".join(restart_remarks(wrong))
