"""How long property tests search: a quarter of hypothesis' default while somebody waits, all of it in CI."""

import os

from hypothesis import settings

if not os.environ.get("CI"):
    settings.register_profile("inner-loop", max_examples=25)
    settings.load_profile("inner-loop")
