"""How long property tests search: a quarter of hypothesis' default while somebody waits, all of it in CI.

How long an example takes is nobody's property here, and a busy machine takes longer: as in hypothesis' profile for CI.
"""

import os

from hypothesis import HealthCheck, settings

if not os.environ.get("CI"):
    settings.register_profile(
        "inner-loop", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("inner-loop")
