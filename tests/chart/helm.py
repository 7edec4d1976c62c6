"""Helm as a command, what it renders, and values that a site may give."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "mmrouter"
RELEASE = "mmrouter"
NAMESPACE = "mmrouter-system"
Object = dict[str, Any]
TEMPLATE = ("template", RELEASE, CHART, f"--namespace={NAMESPACE}")


@dataclass(frozen=True)
class Rendered:
    """The objects of a release, hooks among them."""

    objects: tuple[Object, ...]

    def all(self, kind: str) -> list[Object]:
        return [obj for obj in self.objects if obj["kind"] == kind]

    def one(self, kind: str, name: str = "") -> Object:
        """Return the only object of a kind, or of a kind and a name."""
        found = [obj for obj in self.all(kind) if not name or obj["metadata"]["name"] == name]
        assert len(found) == 1, f"{len(found)} objects {kind} {name}"
        return found[0]

    @cached_property
    def pods(self) -> dict[str, Object]:
        """Name -> spec of every pod."""
        templates = {obj["metadata"]["name"]: obj["spec"]["template"]["spec"] for obj in self.all("Deployment")}
        return templates | {obj["metadata"]["name"]: obj["spec"] for obj in self.all("Pod")}

    @property
    def config(self) -> str:
        """The operator's file."""
        return str(self.one("ConfigMap", "mmrouter-operator-config")["data"]["operator.yaml"])

    @property
    def operator(self) -> Object:
        """The operator's container."""
        container: Object = self.pods["mmrouter-operator"]["containers"][0]
        return container


@dataclass
class Helm:
    """The command; ``home`` is where it keeps what it keeps, ``kubeconfig`` the cluster it is for."""

    command: Path
    home: Path
    kubeconfig: Path | None = None
    _known: dict[str, Rendered] = field(default_factory=dict)

    def at(self, kubeconfig: Path) -> "Helm":
        """Return helm for a cluster."""
        return Helm(self.command, self.home, kubeconfig, self._known)

    def run(self, *arguments: str | Path, values: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
        """Run helm; the caller looks at ``returncode``."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HELM_", "KUBE"))}
        # No cluster: a test that names none reaches none.
        env = {**kept, "HOME": str(self.home), "KUBECONFIG": str(self.kubeconfig or os.devnull)}
        given: Sequence[str] = () if values is None else ("--values", "-")
        return subprocess.run(
            [self.command, *arguments, *given],
            input=None if values is None else json.dumps(values),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            env=env,
        )

    def output(self, *arguments: str | Path, values: Mapping[str, Any] | None = None) -> str:
        """Run helm and return what it printed. Raises ``AssertionError`` if it fails."""
        done = self.run(*arguments, values=values)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refusal(self, *arguments: str | Path, values: Mapping[str, Any] | None = None) -> str:
        """Run helm and return its error. Raises ``AssertionError`` if it succeeds."""
        done = self.run(*arguments, values=values)
        assert done.returncode != 0, done.stdout
        return done.stderr

    def render(self, values: Mapping[str, Any] | None = None, *options: str) -> Rendered:
        """Return what the chart renders, for reading only: a question is answered once. Raises ``AssertionError``."""
        key = json.dumps([values or {}, options], sort_keys=True)
        if key not in self._known:
            text = self.output(*TEMPLATE, *options, values=values or {})
            self._known[key] = Rendered(tuple(obj for obj in yaml.load_all(text, yaml.CSafeLoader) if obj))
        return self._known[key]


MINIMAL = yaml.safe_load("""
model: {id: Qwen/Qwen2.5-VL-3B-Instruct}
engine: {type: vllm}
routing: {media: {maxPixels: 64000000}}
pools: [{name: worker, role: worker, replicas: 2, accelerator: {kind: nvidia}}]
""")
PROMETHEUS = "--api-versions=monitoring.coreos.com/v1"

BARE = yaml.safe_load("""
rbac: {create: false}
serviceAccount: {create: false, name: theirs}
crds: {install: false}
dashboard: {enabled: false}
networkPolicy: {enabled: false}
podDisruptionBudget: {enabled: false}
metrics: {podMonitor: {mode: Disabled}, prometheusRule: {mode: Disabled}}
nodeSelector: null
topologySpreadConstraints: []
resources: null
""")
# Another app.kubernetes.io/name may not be had: frontends know the operator's pods by it.
EVERYTHING = yaml.safe_load(
    """
image: {repository: "registry.example:5000/team/mmrouter", tag: "1.2", digest: DIGEST, pullPolicy: Always}
imagePullSecrets: [{name: regcred}]
operatorConfig:
  image: registry.example/mmrouter:1
  engineImages: {vllm/nvidia: "registry.example/vllm:0.32.0"}
  hubEndpoint: https://hub.example
  sharedMemoryRoot: /dev/shm/ours
  prometheusAddress: http://prometheus.monitoring.svc:9090
  podCidrs: [10.244.0.0/16, "fd00::/8"]
  apiServerCidrs: [10.1.2.3/32]
leaderElection: {leaseDuration: 30, renewDeadline: 20, retryPeriod: 2.5}
log: {level: debug, format: text}
serviceAccount: {annotations: {example.com/team: a}}
metrics:
  serviceAnnotations: {prometheus.io/scrape: "true"}
  podMonitor: {mode: Enabled, interval: 30s, labels: {release: prometheus}}
  prometheusRule: {mode: Enabled, labels: {release: prometheus}, runbooks: "https://docs.example/mmrouter/"}
dashboard: {namespace: monitoring, annotations: {grafana_folder: Inference}}
resources: {requests: {cpu: 1, memory: 1Gi}, limits: {cpu: "1.5", memory: 1Gi}}
nodeSelector: {node-role.kubernetes.io/control-plane: ""}
tolerations: [{key: node-role.kubernetes.io/control-plane, operator: Exists}]
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms: [{matchExpressions: [{key: zone, operator: Exists}]}]
priorityClassName: system-cluster-critical
podLabels: {example.com/team: a, app.kubernetes.io/name: other}
podAnnotations: {example.com/note: "yes: [quoted]"}
extraEnv: [{name: HTTPS_PROXY, value: "http://proxy.example:3128"}]
observability: {otlpEndpoint: "http://otel.example:4318"}
""".replace("DIGEST", f"sha256:{'0' * 64}")
)
TRACED = {**MINIMAL, "observability": {"otlpEndpoint": "http://own.example:4318"}}
EVERYTHING["deployments"] = {"qwen-vl": {"spec": MINIMAL}, "traced": {"namespace": "inference", "spec": TRACED}}

CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "defaults": ({}, ()),
    "prometheus operator": ({}, (PROMETHEUS,)),
    "one pod": ({"replicas": 1}, ()),
    "none for now": ({"replicas": 0}, ()),
    "one team": ({"watchNamespaces": ["team-a", "team-b"], "crds": {"install": False}}, ()),
    "bare": (BARE, (PROMETHEUS,)),
    "everything": (EVERYTHING, ()),
}
