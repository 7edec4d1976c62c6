"""Debian's Prometheus over a running deployment, with the chart's alert rules at another pace."""

import contextlib
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml
from local.rig import ROOT, Deployment
from waiting import answers_ok, wait_for

RULES = ROOT / "charts" / "mmrouter" / "files" / "alerts.yaml"
PROMETHEUS = shutil.which("prometheus")
MINUTE = 2
"""Seconds for which a minute of the rules stands."""
MINUTES = re.compile(r"(?:(?<=\[)|(?<=for: ))(\d+)m\b")
START_SECONDS = 60
ALERT_SECONDS = 240
"""More than the longest time of a rule at this pace, with the range of its query."""


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus. ``url``: of its API."""

    url: str

    def get(self, path: str, **query: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=query, timeout=60).raise_for_status()
        return answer.json()["data"]

    def value(self, query: str) -> float:
        """Return the value of a query with one result or none, which is 0."""
        return sum(float(row["value"][1]) for row in self.get("query", query=query)["result"])

    def alerts(self) -> list[dict[str, Any]]:
        """Return the alerts that are pending or fire."""
        found: list[dict[str, Any]] = self.get("alerts")["alerts"]
        return found

    def firing(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self.alerts() if alert["state"] == "firing"}

    def watches(self) -> bool:
        """Whether every target was scraped and every rule evaluated without an error."""
        targets = self.get("targets")["activeTargets"]
        rules = [rule for group in self.get("rules")["groups"] for rule in group["rules"]]
        healthy = all(target["health"] == "up" for target in targets) and all(rule["health"] == "ok" for rule in rules)
        return bool(targets and rules) and healthy


class Target(NamedTuple):
    """A pod's port for metrics, and the labels that a PodMonitor adds."""

    address: str
    labels: dict[str, str]


def targets_of(deployment: Deployment) -> list[Target]:
    """Return every router and sidecar of a deployment."""
    hosts = {frontend["name"]: httpx.URL(frontend["control"]).host for frontend in deployment.run["frontends"]}
    hosts |= {worker["name"]: worker["ip"] for worker in deployment.state()["workers"]}
    labels = {"namespace": "default", "mmrouter_deployment": "demo"}
    return [Target(f"{ip}:9090", {**labels, "pod": name}) for name, ip in hosts.items()]


@contextlib.contextmanager
def prometheus(folder: Path, targets: Sequence[Target]) -> Iterator[Prometheus]:
    """Scrape the targets and evaluate the rules until the block ends. Skips without Prometheus."""
    if PROMETHEUS is None:
        pytest.skip("not run: no prometheus")
    rules, config = folder / "rules.yaml", folder / "prometheus.yaml"
    rules.write_text(MINUTES.sub(lambda found: f"{int(found[1]) * MINUTE}s", RULES.read_text()))
    static = [{"targets": [target.address], "labels": target.labels} for target in targets]
    settings = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        # As in the operator's PodMonitor: its series have the labels of deployments, not of its own pod.
        "scrape_configs": [{"job_name": "mmrouter", "honor_labels": True, "static_configs": static}],
    }
    config.write_text(yaml.safe_dump(settings))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([PROMETHEUS, *options], stdout=log, stderr=log)
    made = Prometheus(f"http://{address}")
    try:
        known = (folder / "prometheus.log").read_text
        url = f"{made.url}/-/ready"
        wait_for(lambda: process.poll() is not None or answers_ok(url), START_SECONDS, "Prometheus", known=known)
        assert process.poll() is None, known()[-2000:]
        yield made
    finally:
        process.terminate()
        process.wait(60)


def assert_raised_by(
    watching: Prometheus, alert: str, fault: Callable[[], object], about: str = "default/demo"
) -> None:
    """A fault raises an alert, which was pending first, in a deployment that has none before; no other alert fires."""
    wait_for(watching.watches, ALERT_SECONDS, "every pod is scraped, every rule evaluated", known=watching.alerts)
    wait_for(lambda: watching.alerts() == [], ALERT_SECONDS, "no alert is left", known=watching.alerts)
    assert watching.value(f'count_over_time(ALERTS{{alertname="{alert}"}}[1h])') == 0
    fault()
    wait_for(lambda: alert in watching.firing(), ALERT_SECONDS, f"{alert} fires", known=watching.alerts)
    assert watching.firing() == {alert}
    assert watching.value(f'count_over_time(ALERTS{{alertname="{alert}",alertstate="pending"}}[1h])') > 0
    for annotations in [each["annotations"] for each in watching.alerts() if each["state"] == "firing"]:
        assert about in annotations["summary"]
        assert annotations["runbook_url"].endswith(f"#{alert.lower()}")
