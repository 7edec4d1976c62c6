"""Entry point of the command ``mmrouter``.

Commands of containers (``mmrouter router``, ``mmrouter sidecar``, ``mmrouter operator``) are dispatched before anything
else is imported: they do not use the terminal libraries and must start quickly.
"""

import signal
import sys
from types import FrameType

WITHOUT_OPTIONS = ("router", "sidecar", "fetch-metadata", "engine-certificate")
USAGES = {"plugin": "FOLDER", "shared-memory": "FOLDER GROUP"}
EXTRAS = {
    **dict.fromkeys(("router", "fetch-metadata", "gateway"), "router"),
    **dict.fromkeys(("up", "demo"), "local"),
    "sidecar": "sidecar",
    "operator": "operator",
}
"""The extra of the distribution that a command needs; all others need ``cli``, or none."""
CONFIGURED_BY = "its environment and /etc/mmrouter configure it (docs/architecture.md, Wiring)"


def main() -> None:
    """Run a deployable, or the command line tool; where a dependency is not installed, say how to get it."""
    try:
        run(sys.argv[1] if len(sys.argv) > 1 else "")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("mmrouter"):
            raise
        command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        extra = EXTRAS.get(command, "cli")
        sys.stderr.write(
            f"mmrouter {command} needs the package {error.name}: pip install 'mmrouter-k8s[{extra}]' installs it\n"
        )
        sys.exit(2)


def run(command: str) -> None:
    """Run a command by its name."""
    # Linux ignores a signal without a handler for the first process of a container: a pod that is deleted during its
    # start would remain until its grace period ends. Deployables install their own handler later.
    signal.signal(signal.SIGTERM, end)
    if sys.argv[1:] == ["--version"]:  # without the imports of all commands
        from mmrouter_lib import __version__

        sys.stdout.write(f"{__version__}\n")
        sys.exit(0)
    if command in USAGES and sys.argv[2:] in (["-h"], ["--help"]):
        sys.stdout.write(f"usage: mmrouter {command} {USAGES[command]}\n")
        sys.exit(0)
    if command in WITHOUT_OPTIONS and sys.argv[2:]:
        sys.stderr.write(f"mmrouter {command} runs in a pod and takes no options: {CONFIGURED_BY}\n")
        sys.exit(0 if sys.argv[2] in ("-h", "--help") else 2)
    if command == "router":
        from mmrouter_router.__main__ import main as run_router

        sys.exit(run_router())
    if command == "sidecar":
        from mmrouter_sidecar.__main__ import main as run_sidecar

        sys.exit(run_sidecar())
    if command == "engine-certificate":
        from mmrouter_sidecar.engine_certificate import main as copy_certificate

        sys.exit(copy_certificate())
    if command == "shared-memory":
        from mmrouter_sidecar.shared_memory.folder_access import main as open_shared_memory

        sys.exit(open_shared_memory(sys.argv[2:]))
    if command == "fetch-metadata":
        from mmrouter_router.fetch_metadata import main as fetch_metadata

        sys.exit(fetch_metadata())
    if command == "plugin":
        from mmrouter_handover.plugin.start import install_command

        sys.exit(install_command(sys.argv[2:]))
    if command == "operator":
        from mmrouter_operator.__main__ import main as run_operator

        sys.exit(run_operator())
    # No traceback for ctrl-C during imports. A background job of a shell ignores the signal and continues to do so.
    interrupted = signal.getsignal(signal.SIGINT)
    if interrupted is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)
    from mmrouter_cli.app import app

    signal.signal(signal.SIGINT, interrupted)
    app(prog_name="mmrouter")


def end(number: int, frame: FrameType | None) -> None:
    """Handle a signal by exiting with the status of its default action in a shell."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
