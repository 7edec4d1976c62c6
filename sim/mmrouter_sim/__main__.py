"""``python -m mmrouter_sim install DIR`` and ``python -m mmrouter_sim vllm serve MODEL [flags]``."""

import sys
from pathlib import Path

from mmrouter_sim import COMMANDS, install

USAGE = f"usage: python -m mmrouter_sim install DIR | {' | '.join(COMMANDS)} ..."


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    match sys.argv[1:] if argv is None else argv:
        case ["install", directory]:
            for path in install(Path(directory)):
                print(path)
            return 0
        case ["vllm", *rest]:
            # Only what a command needs is loaded: a usage error should not wait for a web framework.
            from mmrouter_sim.flags import parse  # noqa: PLC0415

            settings = parse(rest)
            from mmrouter_sim.server import run  # noqa: PLC0415

            return run(settings)
        case _:
            print(USAGE, file=sys.stderr)
            return 2


if __name__ == "__main__":
    raise SystemExit(main())
