"""Resources: whatever is accepted is rendered, and whatever is refused is refused with a field and a sentence.

Two targets: the operator's own parsing and rendering, and the same beside a real API server, which must refuse what the
operator cannot read, before it is stored.
"""

import json
import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from artefacts import go_programs
from campaign.faults.cluster_pods import missing_programs
from campaign.mutation import changed, places
from campaign.target import BrokenPropertyError, Target
from cluster.controlplane import control_plane
from cluster.crd_cases import SPEC, TEXT, create, good, surprising
from unit.render.objects import GOLDENS, resource
from unit.render.test_junk import everything

from mmrouter_lib.api import SpecError, parse_deployment

ROOT = Path(__file__).resolve().parents[3]


def _names(schema: Any) -> set[str]:
    """Return the names of all fields below a schema."""
    found = set()
    for name, inner in schema.get("properties", {}).items():
        found |= {name} | _names(inner)
    for inner in (schema.get("items"), schema.get("additionalProperties")):
        found |= _names(inner) if isinstance(inner, dict) else set()
    return found


NAMES = sorted(_names(SPEC))
VALUES: tuple[Any, ...] = (
    *TEXT,
    None,
    -1,
    1.5,
    "",
    [],
    {},
    [None],
    0,
    1,
    2,
    16,
    100,
    65_536,
    2**31,
    True,
    False,
    "vllm",
    "sglang",
    "worker",
    "decode",
    "cpu",
)


class Resources(Target):
    """An input: the resource as JSON."""

    name = "resources"
    short = 100

    def seeds(self) -> list[bytes]:
        documents = [*good().values(), *(resource(name) for name in GOLDENS)]
        return [json.dumps(document).encode() for document in documents]

    def draw(self, source: random.Random, kept: Sequence[bytes]) -> bytes:
        document, other = (json.loads(source.choice(kept)) for _ in range(2))
        if source.random() < 0.6:  # one value of the same type, which often fits
            spec = document.get("spec")
            inner = list(places(spec)) if isinstance(spec, dict | list) else []
            holder, key = source.choice(inner or [(document, "spec")])
            same = [value for value in VALUES if type(value) is type(holder[key])]
            holder[key] = source.choice(same) if same else holder[key]
            return json.dumps(document).encode()
        spec = changed(
            source,
            document.get("spec"),
            NAMES,
            VALUES,
            (other["spec"],) if isinstance(other.get("spec"), dict) and other["spec"] else (),
        )
        return json.dumps({**document, "spec": spec}).encode()

    def check(self, data: bytes) -> str:
        document = json.loads(data)
        try:
            with self.product():
                deployment = parse_deployment(document)
        except SpecError as error:
            return "not read: " + _fields(error)
        try:
            with self.product():
                everything(deployment)
        except SpecError as error:
            return "not rendered: " + _fields(error)
        return "rendered " + " ".join(sorted({pool.role for pool in deployment.spec.pools}))


class AdmittedResources(Resources):
    """The same beside an API server. It needs the programs of the level cluster."""

    name = "admitted_resources"
    short = 0

    @classmethod
    def missing(cls) -> str:
        return missing_programs()

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._plane = self._stack.enter_context(control_plane(folder, go_programs("kubernetes"), ROOT / "crds"))
        self._namespace = self._stack.enter_context(self._plane.namespace())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def check(self, data: bytes) -> str:
        own = super().check(data)
        document = json.loads(data)
        document.setdefault("metadata", {})["name"] = "drawn"
        status, answer = create(self._plane, self._namespace, document)
        return f"{judged(status, answer)} {own.split(':')[0]}"


def judged(status: int, answer: Any) -> str:
    """Return the outcome of a creation: the operator reads what was stored, from which the server drops some nulls."""
    if status >= 500:
        raise BrokenPropertyError(f"the API server answered {status}: {answer}", "5xx")
    if status != 201:
        if not answer.get("message"):
            raise BrokenPropertyError(f"refused with {status} and no sentence")
        return str(status)
    try:
        parse_deployment(answer)
    except SpecError as error:
        if sentences := surprising(error):
            raise BrokenPropertyError(f"admitted, but not read: {_fields(error)}: {sentences[0]}") from error
        return "201 beyond CEL"
    return "201"


def _fields(error: SpecError) -> str:
    """Return the fields of a refusal without the numbers in them."""
    if not error.errors or not all(sentence for _, sentence in error.errors):
        raise BrokenPropertyError(f"refused without a sentence: {error.errors}")
    return ".".join(part.partition("[")[0] for part in error.errors[0][0].split(".")[:4])
