"""The table of the gateway: which deployment serves a model, by name, alias or weighted split. Pure.

A conversation keeps its deployment while the weights stay: each target of a split has a score that only it and the
conversation decide, and the highest wins (weighted rendezvous hashing). A change of weights therefore moves only the
share of conversations by which it changes, and none between two targets whose weights stay.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from blake3 import blake3

from mmrouter_router.core.errors import RETRY, RequestError
from mmrouter_router.gateway.config import Target

Exact = Literal["True", "False", "Unknown"]

_BITS: Final = 53  # of a hash that a float holds


class Deployment(NamedTuple):
    """A deployment behind the gateway; ``host`` and ``port`` are its Service's.

    ``exact``: whether routing is proved exact on every worker (condition ExactRoutingVerified). ``exact_ratio``: the
    share of decisions that were exact, ``None`` while unknown.
    """

    name: str
    model: str  # the name by which it serves its model
    host: str
    port: int
    tls: bool = False
    root: str = ""  # the model's name at the hub, or its path
    created: int = 0  # seconds since the epoch
    exact: Exact = "Unknown"
    exact_ratio: float | None = None


class Choice(NamedTuple):
    """Where a request goes, and the name of the model there."""

    deployment: Deployment
    model: str
    weight: int = 1


class Routes:
    """Names of models and their deployments.

    A served name of two deployments is that of the older one. An alias replaces a served name, so that a model can be
    split without a change in its clients.
    """

    def __init__(self, deployments: Iterable[Deployment], aliases: Mapping[str, Sequence[Target]]) -> None:
        """``aliases``: name -> its targets; one without a deployment here is left out."""
        known = sorted(deployments, key=lambda deployment: (deployment.created, deployment.name))
        by_name = {deployment.name: deployment for deployment in known}
        self.deployments = tuple(known)
        self.problems: list[str] = []
        """Served names of two deployments, and aliases without a deployment: sentences for the log."""
        self._choices: dict[str, tuple[Choice, ...]] = {}
        for deployment in known:
            if deployment.model not in self._choices:
                self._choices[deployment.model] = (Choice(deployment, deployment.model),)
            elif deployment.model not in aliases:
                holder = self._choices[deployment.model][0].deployment.name
                self.problems.append(
                    f"{deployment.name} serves the model {deployment.model!r} as {holder} does, which gets its "
                    "requests; an alias of that name can split them"
                )
        for name, targets in aliases.items():
            there = [(target, by_name[target.deployment]) for target in targets if target.deployment in by_name]
            self._choices[name] = tuple(
                Choice(deployment, target.model or deployment.model, target.weight)
                for target, deployment in there
                if target.weight
            )
            absent = sorted({target.deployment for target in targets} - by_name.keys())
            if absent:
                self.problems.append(f"alias {name!r}: there is no deployment {', '.join(absent)}")

    @property
    def names(self) -> list[str]:
        """Names that a request may give as its model and that lead to a deployment."""
        return sorted(name for name, choices in self._choices.items() if choices)

    def choices(self, model: str) -> tuple[Choice, ...]:
        """Return where requests for a model go: one choice, or those of a split.

        Raises :class:`RequestError`: 404 for an unknown name, 503 for an alias none of whose deployments is there.
        """
        choices = self._choices.get(model)
        if choices is None:
            raise RequestError.unknown_model(model, self.names)
        if not choices:
            message = f"None of the deployments of the model '{model}' is there now. Try again."
            raise RequestError(503, message, type="server_error", param="model", code="no_deployment", headers=RETRY)
        return choices

    def models(self) -> list[dict[str, Any]]:
        """Return the entries of ``/v1/models``, by name."""
        return [_entry(name, self._choices[name]) for name in self.names]


def of_conversation(model: str, choices: Sequence[Choice], conversation: bytes) -> Choice:
    """Return the choice of a split for a conversation; over many, each gets the share of its weight."""

    def score(choice: Choice) -> float:
        hasher = blake3(f"{len(model)}:{model}:{choice.deployment.name}:".encode("utf-8", "replace"))
        hasher.update(conversation)
        number = int.from_bytes(hasher.digest(8)) >> (64 - _BITS)
        return -choice.weight / math.log((number + 0.5) / (1 << _BITS))

    return max(choices, key=score)


def _entry(name: str, choices: Sequence[Choice]) -> dict[str, Any]:
    deployments = [choice.deployment for choice in choices]
    exact: set[Exact] = {deployment.exact for deployment in deployments}
    return {
        "id": name,
        "object": "model",
        "created": min(deployment.created for deployment in deployments),
        "owned_by": "mmrouter",
        "root": deployments[0].root or deployments[0].model,
        "exact": exact.pop() if len(exact) == 1 else "False" if "False" in exact else "Unknown",
        "deployments": [
            {
                "name": choice.deployment.name,
                "model": choice.model,
                "weight": choice.weight,
                "exact": choice.deployment.exact,
                "exact_ratio": choice.deployment.exact_ratio,
            }
            for choice in choices
        ],
    }
