"""The operator's metrics (docs/operator.md has the table)."""

import platform
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

import mmrouter_lib as mmrouter
from mmrouter_operator.model.snapshot import Key

_PREFIX = "mmrouter_operator_"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """One registry per operator, so that two of them can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, help, labels, registry=self.registry)

        def gauge(name: str, help: str, *labels: str) -> Gauge:
            return Gauge(_PREFIX + name, help, labels, registry=self.registry)

        def histogram(name: str, help: str) -> Histogram:
            return Histogram(_PREFIX + name, help, buckets=_SECONDS, registry=self.registry)

        self.reconciles = counter("reconcile", "Reconciles by result.", "result")
        """Results: success, retry, error, timeout or gone."""
        self.duration = histogram("reconcile_duration_seconds", "Time of one reconcile.")
        self.depth = gauge("queue_depth", "Due deployments that wait for a worker of the queue.")
        self.wait = histogram("queue_wait_seconds", "Time from when a reconcile was due to its start.")
        self.applies = counter("apply", "Writes of children by kind and result.", "kind", "result")
        """Results: applied, deleted or the name of the error."""
        self.drift = counter("drift_repaired", "Children restored after foreign changes.", "kind")
        names = ("namespace", "name")
        self._conditions = gauge("condition", "1 for the current status of a condition.", *names, "type", "status")
        closed = "Engine pods whose containers are ready and whose readiness gate is closed."
        self._closed_gates = gauge("closed_gates", closed, *names, "gate")
        ignored = "Fields of a newer CRD that are ignored because they have their defaults."
        self._ignored = gauge("ignored_fields", ignored, *names)
        self.leader = gauge("leader", "1 while this replica is the leader.")
        build = gauge("build_info", "Version of the operator and of Python; always 1.", "version", "python")
        build.labels(mmrouter.__version__, platform.python_version()).set(1)
        self._ignoring: dict[Key, frozenset[str]] = {}
        self._shown: dict[Key, set[tuple[str, str]]] = {}
        self._gates: dict[Key, set[str]] = {}

    def ignored(self, key: Key, paths: Iterable[str]) -> list[str]:
        """A resource's fields were ignored, and no others any more. Returns those that were not before."""
        before, now = self._ignoring.pop(key, frozenset()), frozenset(paths)
        if now:
            self._ignoring[key] = now
            self._ignored.labels(*key).set(len(now))
        elif before:
            self._ignored.remove(*key)
        return sorted(now - before)

    def conditions(self, key: Key, statuses: Iterable[tuple[str, str]]) -> None:
        """Show a deployment's conditions, (type, status) each, in place of those shown before; none when it is gone."""
        now = set(statuses)
        for old in self._shown.pop(key, set()) - now:
            self._conditions.remove(*key, *old)
        for pair in now:
            self._conditions.labels(*key, *pair).set(1)
        if now:
            self._shown[key] = now

    def closed_gates(self, key: Key, counts: Mapping[str, int]) -> None:
        """Show a deployment's closed gates by gate, in place of those shown before; none when it is gone."""
        for gone in self._gates.pop(key, set()) - counts.keys():
            self._closed_gates.remove(*key, gone)
        for gate, count in counts.items():
            self._closed_gates.labels(*key, gate).set(count)
        if counts:
            self._gates[key] = set(counts)

    def forget(self, key: Key) -> None:
        """Show nothing of a deployment's state: it is gone."""
        self.conditions(key, ())
        self.closed_gates(key, {})

    def forget_all(self) -> None:
        """Show the state of no deployment: another replica shows it now."""
        for key in self._shown.keys() | self._gates.keys():
            self.forget(key)
