"""``python -m mmrouter_sim install DIR | vllm serve MODEL [flags] | sglang serve --model-path MODEL [flags]``."""

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
            # Lazy imports, so that a usage error does not wait for a web framework.
            from mmrouter_sim.vllm.flags import parse  # noqa: PLC0415

            settings = parse(rest)
            from mmrouter_sim.server import run  # noqa: PLC0415

            return run(settings)
        case ["sglang", *rest]:
            from mmrouter_sim.sglang.flags import parse as parse_sglang  # noqa: PLC0415

            settings = parse_sglang(rest)
            from mmrouter_sim.server import run  # noqa: PLC0415

            return run(settings)
        case _:
            print(USAGE, file=sys.stderr)
            return 2


if __name__ == "__main__":
    raise SystemExit(main())
