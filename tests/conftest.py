"""How hard the property tests try.

``default`` repeats the same examples on each run, so that a failure belongs to a change and not to
chance. ``pytest --hypothesis-profile thorough`` looks at many more, at random; the tests marked
``slow`` do so by themselves.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "default",
    max_examples=100,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile(
    "thorough", settings.get_profile("default"), max_examples=2000, derandomize=False
)
settings.load_profile("default")
