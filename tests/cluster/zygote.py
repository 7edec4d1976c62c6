"""Operators that start in no time and die on cue: forks of a process that has imported everything.

    python zygote.py    # reads a line of JSON for each operator: {"arguments": [...], "calls": N}

The operator of a line kills itself (SIGKILL) as soon as the server has answered its call number ``calls``, before it
has read the answer; calls to Leases and to discovery are not counted. For each line one line comes back: the exit
status, negative for a signal.
"""

import gc
import json
import os
import signal
import sys
from typing import Any

import mmrouter_operator.__main__ as command
import mmrouter_operator.app  # noqa: F401 - here, once, instead of in every fork
from mmrouter_operator.apply import KubernetesCluster

START_SECONDS, QUIET_SECONDS = 40, 5
"""An operator ends by SIGALRM when it has made no call for so long: it will not come as far as it was told."""


def die_after(calls: int) -> None:
    """Have this process killed once the server has answered so many calls."""
    call = KubernetesCluster._call
    left = calls

    async def counted(self: KubernetesCluster, method: str, path: str, **more: Any) -> Any:
        nonlocal left
        # An API error is an answer, too.
        try:
            return await call(self, method, path, **more)
        finally:
            if "/leases" not in path and path != "/apis" and method != "GET":
                left -= 1
                signal.alarm(QUIET_SECONDS)
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

    KubernetesCluster._call = counted  # type: ignore[method-assign]


def main() -> None:
    """Serve until the input ends."""
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if not pid:
            signal.alarm(START_SECONDS)
            die_after(request["calls"])
            os._exit(command.main(request["arguments"]))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
