"""Operators that start in no time and die on cue: forks of a process that has imported everything.

    python zygote.py    # reads a line of JSON for each operator: {"arguments": [...], "calls": N}

The operator of a line kills itself (SIGKILL) as soon as the server has answered its call number ``calls``, before it
has read the answer, and ends with status 0 once it has reconciled a deployment to the end. Calls are those of
reconciles, reads as well as writes: not counted are Leases, discovery, and the listings that its caches are compared
with. For each line one line of JSON comes back: {"status": the exit status, negative for a signal, "calls": M}.
"""

import gc
import json
import os
import signal
import sys
from typing import Any

import mmrouter_operator.__main__ as command
import mmrouter_operator.runtime.operator  # noqa: F401 - here, once, instead of in every fork
from mmrouter_operator.cluster.client import KubernetesCluster
from mmrouter_operator.model.snapshot import Key
from mmrouter_operator.runtime.reconciler import Reconciler

PATIENCE_SECONDS = 60
"""An operator that does neither for so long ends by SIGALRM."""


def die_after(calls: int, writer: int) -> None:
    """Have this process killed once the server has answered so many calls; for each a byte goes to ``writer``."""
    call, reconcile = KubernetesCluster._call, Reconciler.reconcile
    left = calls

    async def counted(self: KubernetesCluster, method: str, path: str, **more: Any) -> Any:
        nonlocal left
        # An API error is an answer, too.
        try:
            return await call(self, method, path, **more)
        finally:
            if "/leases" not in path and path != "/apis" and "PartialObjectMetadataList" not in more.get("accept", ""):
                os.write(writer, b".")
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

    async def last(self: Reconciler, key: Key) -> float | None:
        await reconcile(self, key)
        os._exit(0)

    KubernetesCluster._call = counted  # type: ignore[method-assign]
    Reconciler.reconcile = last  # type: ignore[method-assign]


def main() -> None:
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        heard, writer = os.pipe()
        pid = os.fork()
        if not pid:
            signal.alarm(PATIENCE_SECONDS)
            die_after(request["calls"], writer)
            os._exit(command.main(request["arguments"]))
        os.close(writer)
        _, status = os.waitpid(pid, 0)
        with os.fdopen(heard, "rb") as answered:
            answer = {"status": os.waitstatus_to_exitcode(status), "calls": len(answered.read())}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
