"""``python -m mmrouter_sim install DIR | vllm serve MODEL [flags] | sglang serve --model-path MODEL [flags]``."""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from mmrouter_sim import COMMANDS, install

if TYPE_CHECKING:
    from mmrouter_sim.settings import Settings

USAGE = f"usage: python -m mmrouter_sim install DIR | {' | '.join(COMMANDS)} ..."


def main(argv: list[str] | None = None) -> int:
    match sys.argv[1:] if argv is None else argv:
        case ["install", directory]:
            for path in install(Path(directory)):
                print(path)
            return 0
        case ["vllm" | "sglang" as engine, *rest]:
            # Lazy imports, so that a usage error does not wait for a web framework.
            settings: Settings = import_module(f"mmrouter_sim.{engine}.flags").parse(rest)
            from mmrouter_sim.server import run  # noqa: PLC0415

            return run(settings)
        case _:
            print(USAGE, file=sys.stderr)
            return 2


if __name__ == "__main__":
    raise SystemExit(main())
