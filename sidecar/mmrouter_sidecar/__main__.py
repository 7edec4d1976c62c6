"""``mmrouter sidecar``: one process beside one engine; configuration comes from files and environment only.

It must be ready in a moment and stay small beside every engine, so another process reads its settings
(:mod:`mmrouter_sidecar.settings_loader`) while this one imports what it serves with.
"""

import subprocess
import sys

from mmrouter_sidecar.logs import log_to_stderr


def main() -> int:
    """Run until SIGTERM. Exit status 2: the configuration is wrong, and the last line says what."""
    log_to_stderr()
    with subprocess.Popen([sys.executable, "-m", "mmrouter_sidecar.settings_loader"], stdout=subprocess.PIPE) as reader:
        from mmrouter_sidecar.process import serve  # noqa: PLC0415 - while the other process reads

        told, _ = reader.communicate()
    if reader.returncode:
        return max(reader.returncode, 1)  # it has said why, unless it was killed
    return serve(told)


if __name__ == "__main__":
    sys.exit(main())
