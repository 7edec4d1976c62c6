#!/usr/bin/env python3
"""A runtime for Docker: runc, with no capability in a container that this process lacks.

A privileged container asks for all of them, and runc fails where its own root has fewer, as on some virtual machines:
``unable to apply caps: operation not permitted``.
"""

import json
import os
import re
import sys
from itertools import pairwise
from pathlib import Path

CAPABILITIES = """
CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE
NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT
SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP
MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE
"""
"""By number, as in ``capability.h``."""


def permitted() -> set[str]:
    match = re.search(r"^CapPrm:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    bits = int(match[1], 16) if match else 0
    return {f"CAP_{name}" for number, name in enumerate(CAPABILITIES.split()) if bits >> number & 1}


def lessen(path: Path) -> None:
    """Take from a container's ``config.json``, or the process of an ``exec``, what is not permitted."""
    spec = json.loads(path.read_text())
    sets = spec.get("process", spec).get("capabilities") or {}
    allowed = permitted()
    for name, values in sets.items():
        sets[name] = [value for value in values or [] if value in allowed]
    path.write_text(json.dumps(spec))


def main() -> None:
    arguments = sys.argv[1:]
    for option, value in pairwise(arguments):
        if option == "--bundle" and "create" in arguments:
            lessen(Path(value, "config.json"))
        if option == "--process" and "exec" in arguments:
            lessen(Path(value))
    os.execvp("runc", ["runc", *arguments])


if __name__ == "__main__":
    main()
