"""Runs under callgrind: an empty function, then each scenario and its floor, with a dump after each."""

import gc
import os
import subprocess
from collections.abc import Callable
from typing import Any

from bench.quick.scenarios import scenarios


def control(*options: str) -> None:
    """Control callgrind on this process. Raises ``CalledProcessError``."""
    subprocess.run(
        ["callgrind_control", *options, str(os.getpid())],
        check=True,
        stdout=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )


def main() -> None:
    """Run everything once to warm up, and once counted."""
    with scenarios() as pieces:
        works: list[tuple[Callable[[Any], object], Callable[[], Any]]] = [(lambda _: None, lambda: None)]
        works += [(work, scenario.fresh) for scenario in pieces for work in (scenario.once, scenario.floor)]
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
