"""Hypothesis for all tests: no limit on time, the same examples in every run; --hypothesis-profile=fresh draws others."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A busy machine draws slowly; that is no fault of a test.
_PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile("same", derandomize=True, **_PATIENT)
settings.register_profile("fresh", **_PATIENT)
settings.load_profile("same")
