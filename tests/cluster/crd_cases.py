"""The tables in ``specs/``: good specs, what is put into them, and what the API server says of that."""

import copy
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from cluster.controlplane import ControlPlane

SPECS = Path(__file__).with_name("specs")
PATH = "/apis/mmrouter.io/v1alpha1/namespaces/{}/mmrouterdeployments"
_PART = re.compile(r"([^.\[\]]+)|\[(\d+)\]")

Object = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One row of a table. ``says`` is empty for what is allowed."""

    number: int
    of: str
    document: Object
    field: str
    says: str

    @property
    def id(self) -> str:
        """What pytest calls the row."""
        return f"{self.number}-{self.field or self.of}"


def good() -> dict[str, Object]:
    """Return the good objects by name."""
    return {name: _document(name, copy.deepcopy(spec)) for name, spec in _load("good").items()}


def cases(table: str) -> list[Case]:
    """Return the rows of ``specs/TABLE.yaml``, each with the whole object it makes."""
    return [_case(number, row) for number, row in enumerate(_load(table))]


def put(document: Object, path: str, value: Any) -> None:
    """Put a value into a decoded document, at ``spec.pools[0].name``; what is missing on the way is made."""
    *way, last = _parts(path)
    node: Any = document
    for part in way:
        node = node.setdefault(part, {}) if isinstance(part, str) else node[part]
    node[last] = value


def drop(document: Object, path: str) -> None:
    """Take out the field at a path."""
    *way, last = _parts(path)
    node: Any = document
    for part in way:
        node = node[part]
    del node[last]


def create(cluster: ControlPlane, namespace: str, document: Object, *, store: bool = False) -> tuple[int, Object]:
    """Create the object, by default as a dry run; return the status and the answer. Unknown fields are errors."""
    params = {} if store else {"dryRun": "All"}
    answer = cluster.request("POST", PATH.format(namespace), document, fieldValidation="Strict", **params)
    return answer.status_code, answer.json()


def replace(cluster: ControlPlane, namespace: str, document: Object) -> tuple[int, Object]:
    """Try to replace a stored object of the same name, as a dry run."""
    path = f"{PATH.format(namespace)}/{document['metadata']['name']}"
    answer = cluster.request("PUT", path, document, fieldValidation="Strict", dryRun="All")
    return answer.status_code, answer.json()


@cache
def _load(table: str) -> Any:
    return yaml.safe_load((SPECS / f"{table}.yaml").read_text())


def _document(name: str, spec: Object) -> Object:
    return {
        "apiVersion": "mmrouter.io/v1alpha1",
        "kind": "MMRouterDeployment",
        "metadata": {"name": name},
        "spec": spec,
    }


def _case(number: int, row: Object) -> Case:
    of = row.get("of", "minimal")
    document = good()[of]
    for path, value in row.get("set", {}).items():
        put(document, path, copy.deepcopy(value))
    if "drop" in row:
        drop(document, row["drop"])
    if "add" in row:
        document["spec"]["pools"].append(row["add"])
    if "cut" in row:
        del document["spec"]["pools"][row["cut"] :]
    return Case(number, of, document, row.get("field", ""), row.get("says", ""))


def _parts(path: str) -> list[str | int]:
    return [name or int(index) for name, index in _PART.findall(path)]
