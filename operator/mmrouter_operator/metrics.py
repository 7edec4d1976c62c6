"""The operator's metrics (docs/operator.md has the table)."""

import platform
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

import mmrouter_lib as mmrouter
from mmrouter_operator.model.snapshot import Key

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """One registry per operator, so that two of them can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prefix = "mmrouter_operator"
        self._reconciles = Counter(f"{prefix}_reconcile", "Reconciles by result.", ["result"], registry=self.registry)
        self._duration = Histogram(
            f"{prefix}_reconcile_duration_seconds", "Time of one reconcile.", buckets=_SECONDS, registry=self.registry
        )
        self._depth = Gauge(
            f"{prefix}_queue_depth", "Due deployments that wait for a worker of the queue.", registry=self.registry
        )
        self._wait = Histogram(
            f"{prefix}_queue_wait_seconds",
            "Time from when a reconcile was due to its start.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._applies = Counter(
            f"{prefix}_apply", "Writes of children by kind and result.", ["kind", "result"], registry=self.registry
        )
        self._drift = Counter(
            f"{prefix}_drift_repaired", "Children restored after foreign changes.", ["kind"], registry=self.registry
        )
        self._conditions = Gauge(
            f"{prefix}_condition",
            "1 for the current status of a condition.",
            ["namespace", "name", "type", "status"],
            registry=self.registry,
        )
        self._ignored = Gauge(
            f"{prefix}_ignored_fields",
            "Fields of a newer CRD that are ignored because they have their defaults.",
            ["namespace", "name"],
            registry=self.registry,
        )
        self._ignoring: dict[Key, frozenset[str]] = {}
        self._leader = Gauge(f"{prefix}_leader", "1 while this replica is the leader.", registry=self.registry)
        build = Gauge(
            f"{prefix}_build_info",
            "Version of the operator and of Python; always 1.",
            ["version", "python"],
            registry=self.registry,
        )
        build.labels(mmrouter.__version__, platform.python_version()).set(1)
        self._shown: dict[Key, set[tuple[str, str]]] = {}

    def depth(self, ready: int) -> None:
        """``ready`` deployments could run now."""
        self._depth.set(ready)

    def started(self, waited: float) -> None:
        """A reconcile started, ``waited`` seconds after it was due."""
        self._wait.observe(max(waited, 0.0))

    def finished(self, result: str, seconds: float) -> None:
        """A reconcile ended; ``result`` is success, retry, error, timeout or gone."""
        self._reconciles.labels(result).inc()
        self._duration.observe(seconds)

    def applied(self, kind: str, result: str) -> None:
        """A child was written; ``result`` is applied, created, deleted or the name of the error."""
        self._applies.labels(kind, result).inc()

    def drift_repaired(self, kind: str) -> None:
        """Count a repair of a field that another writer had changed."""
        self._drift.labels(kind).inc()

    def ignored(self, key: Key, paths: Iterable[str]) -> list[str]:
        """A resource's fields were ignored, and no others any more. Returns those that were not before."""
        before, now = self._ignoring.pop(key, frozenset()), frozenset(paths)
        if now:
            self._ignoring[key] = now
            self._ignored.labels(*key).set(len(now))
        elif before:
            self._ignored.remove(*key)
        return sorted(now - before)

    def leading(self, yes: bool) -> None:
        """Whether this replica reconciles."""
        self._leader.set(int(yes))

    def conditions(self, key: Key, statuses: Iterable[tuple[str, str]]) -> None:
        """Show a deployment's conditions, (type, status) each, in place of those shown before; none when it is gone."""
        now = set(statuses)
        for old in self._shown.pop(key, set()) - now:
            self._conditions.remove(*key, *old)
        for pair in now:
            self._conditions.labels(*key, *pair).set(1)
        if now:
            self._shown[key] = now

    def forget_conditions(self) -> None:
        """Show none: another replica shows them now."""
        for key in list(self._shown):
            self.conditions(key, ())
