"""A process that outlives a test run just long enough to take its cluster's node away, however the run ended.

Run as a script with the node's name. At the end of its input, which the kernel brings about even when the run was
killed, it kills the pods and removes the control group and the network namespace of that name, both interfaces and the
route with it. Mounts need no removal: they are in a mount namespace that ends with its processes.
"""

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from e2e.groups import remove_group
from e2e.network import remove


def main() -> None:
    """Wait for the end of the input, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    remove_group(sys.argv[1])
    remove(sys.argv[1])


if __name__ == "__main__":
    main()
