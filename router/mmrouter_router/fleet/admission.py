"""Who has been let in: a new pod serves once the operator has opened its readiness gates (docs/architecture.md). Pure.

A gate that is open stays open, so a router that starts anew has nobody to wait for. An operator may be away: it is not
waited for longer than ``verification.timeoutSeconds``.
"""

from collections.abc import Iterable

from mmrouter_router.fleet.workers import Worker


def is_let_in(worker: Worker, now: float, seconds: float) -> bool:
    """Whether a pod may serve beside others. ``now``: on the fleet's clock; ``seconds``: how long gates count."""
    return worker.member.admitted or now - worker.since >= seconds


def preferred(workers: Iterable[Worker], now: float, seconds: float) -> list[Worker]:
    """Return those that have been let in; all of them where nobody has."""
    known = list(workers)
    return [worker for worker in known if is_let_in(worker, now, seconds)] or known
