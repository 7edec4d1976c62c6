"""What the checks are given (facts) and what they return: findings, the advice in them, and how they are printed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Final, Literal, NamedTuple

import yaml
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mmrouter_cli.doctor.picker_health import PickerHealth
from mmrouter_cli.status.control_api import State, Unread
from mmrouter_lib.api import MMRouterDeployment, SpecError
from mmrouter_operator.model.external_refs import Reference
from mmrouter_operator.status.conditions import TEXTS

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; ``do`` is the advice, empty where no action is needed."""

    level: Level
    check: str
    """Name of the check; stable, for programs. Checks leave it empty, and :mod:`.diagnose` fills it in."""
    seen: str
    do: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings on one subject: the cluster, or a deployment."""

    subject: str
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> int:
        return sum(finding.level == "problem" for finding in self.findings)


def ok(seen: str) -> Finding:
    return Finding("ok", "", seen)


def warning(seen: str, do: str) -> Finding:
    """Return a finding of something that works imperfectly, is in progress, or could not be checked."""
    return Finding("warning", "", seen, do)


def problem(seen: str, do: str) -> Finding:
    """Return a finding of something that keeps the deployment from working as specified."""
    return Finding("problem", "", seen, do)


def unread(what: str, value: Unread, *, them: bool = True) -> Finding:
    """Return a finding of facts that this user cannot read."""
    do = f"Run this with the right to read {'them' if them else 'it'}."
    return warning(f"{what} cannot be read: {value.why}", do)


_MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "problem": ("PROBLEM", "bold red")}


def as_json(diagnoses: Sequence[Diagnosis]) -> dict[str, Any]:
    return {
        "passed": not any(diagnosis.problems for diagnosis in diagnoses),
        "problems": sum(diagnosis.problems for diagnosis in diagnoses),
        "subjects": [asdict(diagnosis) for diagnosis in diagnoses],
    }


def show(console: Console, diagnoses: Sequence[Diagnosis]) -> None:
    for diagnosis in diagnoses:
        console.print(Text(diagnosis.subject, style="bold"))
        table = Table.grid(padding=(0, 2, 0, 0))
        for _ in ("level", "check", "text"):
            table.add_column(overflow="fold")  # the end of a URL or a pod's name must stay visible
        for item in diagnosis.findings:
            mark, style = _MARKS[item.level]
            text = Text(item.seen)
            if item.do:
                text.append(f"\n-> {item.do}", style="cyan")
            table.add_row(Text(mark, style=style), Text(item.check), text)
        console.print(Padding(table, (0, 0, 1, 2)))
    problems = sum(diagnosis.problems for diagnosis in diagnoses)
    warnings = sum(item.level == "warning" for diagnosis in diagnoses for item in diagnosis.findings)
    total = f"{problems} problem{'' if problems == 1 else 's'}, {warnings} warning{'' if warnings == 1 else 's'}"
    console.print(Text(total, style="red" if problems else "green"))


Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """Facts that belong to no deployment."""

    now: float
    """Seconds since the epoch, by this machine's clock."""
    apis: frozenset[str] | Unread
    """Served `group/version` texts."""
    crd: Object | Unread | None
    leases: Sequence[Object] | Unread
    """Leases of operators, in all namespaces."""
    renewed: bool = False
    """Whether a Lease was renewed while it was observed, independent of clocks."""
    operators: Sequence[Object] | Unread = ()
    """Pods of operators, in all namespaces."""
    nodes: Sequence[Object] | Unread = ()
    pods: Sequence[Object] | Unread = ()
    """Pods of all namespaces that have not ended; they determine what nodes have left."""


@dataclass(frozen=True, slots=True)
class GatewayFacts:
    """What lies between gateways and a deployment."""

    objects: Sequence[Object] | Unread | None = None
    """Its InferencePool and its HTTPRoute; ``None`` where the cluster does not serve their APIs."""
    policies: Sequence[Object] | Unread = ()
    """NetworkPolicies of its namespace."""
    limits: Mapping[Any, Sequence[Object] | Unread] = field(default_factory=dict)
    """Kind of a policy that limits bodies (:class:`.check_gateway.LimitKind`) -> those that may be for its route."""


@dataclass(frozen=True, slots=True)
class DeploymentFacts:
    """One deployment and its objects."""

    resource: Object
    dep: MMRouterDeployment | SpecError
    namespace: Object | Unread
    pods: Sequence[Object] | Unread
    referred: Mapping[Reference, Object | Unread | None] = field(default_factory=dict)
    """Objects that the resource names and does not own; ``None``: missing."""
    shared_memory: Mapping[str, tuple[int, int]] | Unread = field(default_factory=dict)
    """Pod -> used bytes and size of its /dev/shm, where the kubelet reports it."""
    gateway: GatewayFacts | None = None
    """``None`` for a deployment that is not behind a gateway."""

    @property
    def name(self) -> str:
        return str(self.resource["metadata"]["name"])


class FrontendFacts(NamedTuple):
    """One frontend, queried twice; a failure of the first query stands in both."""

    name: str
    first: State | Unread
    second: State | Unread


class RoutingFacts(NamedTuple):
    """All frontends of a deployment; ``seconds`` between the two queries."""

    frontends: tuple[FrontendFacts, ...]
    seconds: float
    advice: str = "Give the URL of a frontend's control API with --control and its token with --token."
    """Advice for a frontend that cannot be queried."""
    pickers: tuple[tuple[str, PickerHealth | Unread], ...] = ()
    """The health of the frontends' endpoint pickers, by the frontends' names."""
    is_local: bool = False
    """Its pods are processes of a ``mmrouter up`` on this machine."""

    def log_of(self, pod: str, container: str) -> str:
        """Return where the output of a container is."""
        if self.is_local:
            return f"the lines of {pod}/{container} in the log of mmrouter up, which names the file first"
        return f"kubectl logs {pod} -c {container}"


def reason_advice(condition: str, reason: str) -> str:
    """Return what to do about a condition's reason, which may be one of a newer operator."""
    texts = _condition_texts().get(condition, {})
    _, do = texts.get(reason, ("", f"see docs/conditions.md, {reason}"))
    return f"{do[0].upper()}{do[1:]}."


@cache
def _condition_texts() -> dict[str, dict[str, tuple[str, str]]]:
    return dict(yaml.safe_load(TEXTS.read_text()))


CAUSES: Final[Mapping[str, str]] = {
    "no_events": "The engine publishes no events: check its log, its args, and the sidecar's log.",
    "block_size": "Set the pool's blockSize to the engine's block size, or remove both settings.",
    "salt": "The engine uses another salt: use an unmodified release that docs/conformance.md lists.",
    "truncation": "The engine cut the prompt: raise its --max-model-len.",
    "count": "The image processor differs: check engine.processor and the model's preprocessor_config.json.",
    "template": "The chat template differs: set engine.chatTemplate, and give all pods the same revision.",
    "identity": "The engine names images in another way: use a release that docs/conformance.md lists.",
    "unknown": "Compare a request: mmrouter explain URL REQUEST_ID --parity",
}
"""Cause of a difference between predicted and published blocks -> what to do."""
