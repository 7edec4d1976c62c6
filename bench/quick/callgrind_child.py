"""What callgrind counts the instructions of: nothing, then each scenario and its floor, a dump after each of them."""

import gc
import os
import subprocess
from collections.abc import Callable
from typing import Any

from bench.quick.scenarios import scenarios


def control(*asked: str) -> None:
    """Have callgrind do something. Raises ``CalledProcessError``."""
    subprocess.run(
        ["callgrind_control", *asked, str(os.getpid())], check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )


def main() -> None:
    """Run everything once to warm it, and once more counted."""
    with scenarios() as found:
        works: list[tuple[Callable[[Any], object], Callable[[], Any]]] = [(lambda _: None, lambda: None)]
        works += [(work, scenario.fresh) for scenario in found for work in (scenario.once, scenario.floor)]
        gc.collect()
        gc.disable()
        for work, fresh in works:
            work(fresh())
            state = fresh()
            control("-i", "on")
            work(state)
            control("-i", "off")
            control("-d")


if __name__ == "__main__":
    main()
