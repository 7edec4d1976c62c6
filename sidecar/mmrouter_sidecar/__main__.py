"""Start the sidecar (``mmrouter sidecar``). Its configuration comes from files and environment variables only.

To start fast and stay small, a second process reads the settings (:mod:`mmrouter_sidecar.settings_loader`) while this
one imports the modules it serves with.
"""

import subprocess
import sys

from mmrouter_sidecar import log_to_stderr


def main() -> int:
    """Run until SIGTERM. Exit status 2: the configuration is wrong, as the last line of the log describes."""
    log_to_stderr()
    with subprocess.Popen([sys.executable, "-m", "mmrouter_sidecar.settings_loader"], stdout=subprocess.PIPE) as reader:
        from mmrouter_sidecar.app import serve  # noqa: PLC0415 - while the other process reads

        settings, _ = reader.communicate()
    if reader.returncode:
        return max(reader.returncode, 1)  # it has logged the reason, unless it was killed
    return serve(settings)


if __name__ == "__main__":
    sys.exit(main())
