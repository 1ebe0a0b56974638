"""How many examples a property test looks at, under the profile in force."""

from __future__ import annotations

from hypothesis import settings


def examples(factor: float = 1.0) -> int:
    """``factor`` times what the profile says, and at least 10."""
    profile = settings.get_profile(settings.get_current_profile_name())
    return max(10, int(profile.max_examples * factor))
