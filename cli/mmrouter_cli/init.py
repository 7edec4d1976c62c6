"""`mmrouter init`: answers, their validation, and the commented mmrouter.yaml made from them."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast, get_args

import yaml

from mmrouter_lib.api import AcceleratorKind, EngineType, SpecError, parse_deployment
from mmrouter_lib.api.deployment import NAME_LENGTH
from mmrouter_operator.model.accelerators import ACCELERATORS, ENGINE_VERSIONS

ENGINES: Final = get_args(EngineType)
KINDS: Final = get_args(AcceleratorKind)
MOST_REPLICAS: Final = 1000

_PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*([/:@][A-Za-z0-9_.-]+)*")
_NOT_TEXT: Final = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
"""Words that some YAML version does not read as text."""


class AnswerError(ValueError):
    """An invalid answer; the message gives the reason without naming the question."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The parameters of a deployment. Empty texts mean the default, which for ``name`` follows from the model."""

    model: str = "Qwen/Qwen2.5-VL-3B-Instruct"
    engine: str = "vllm"
    accelerator: str = "nvidia"
    replicas: int = 2
    name: str = ""
    image: str = ""

    @property
    def object_name(self) -> str:
        """The deployment's name: as given, or derived from the model id."""
        return self.name or name_of(self.model)

    @property
    def needs_image(self) -> bool:
        """Whether no image of this engine for this accelerator is published, and none was given."""
        return not self.image and not _published(self.engine, self.accelerator)


def _checked(section: str, field: str, text: str) -> str:
    """Return the text if the rules of the resource accept it there. Raises :class:`AnswerError`."""
    made = resource(Answers())
    (made[section] if section == "metadata" else made["spec"][section])[field] = text.strip()
    try:
        parse_deployment(made)
    except SpecError as error:
        raise AnswerError(error.errors[0][1]) from error
    return text.strip()


def _one_of(allowed: tuple[str, ...], text: str) -> str:
    word = text.strip().lower()
    if word not in allowed:
        raise AnswerError(f"{text!r} is none of {', '.join(allowed)}")
    return word


def _replicas(text: str) -> int:
    stripped = text.strip()
    if not (stripped.isascii() and stripped.isdigit() and 1 <= int(stripped[:9]) <= MOST_REPLICAS):
        raise AnswerError(f"{text!r} is not a number from 1 to {MOST_REPLICAS}")
    return int(stripped)


READ: Final[dict[str, Callable[[str], str | int]]] = {
    "model": partial(_checked, "model", "id"),
    "engine": partial(_one_of, ENGINES),
    "accelerator": partial(_one_of, KINDS),
    "replicas": _replicas,
    "name": lambda text: _checked("metadata", "name", text) if text.strip() else "",
    "image": partial(_checked, "engine", "image"),
}
"""Field of :class:`Answers` -> what reads an answer for it, and raises :class:`AnswerError`."""
QUESTIONS: Final = {
    "model": "Model (a repository of the hub)",
    "engine": f"Engine ({', '.join(ENGINES)})",
    "accelerator": f"Accelerator ({', '.join(KINDS)})",
    "replicas": "Replicas",
}
"""Field -> the question."""


def name_of(model_id: str) -> str:
    """Return a Kubernetes name for a model id, such as `qwen2-5-vl-3b-instruct`."""
    words = re.sub(r"[^a-z0-9]+", "-", model_id.rstrip("/").rpartition("/")[2].lower())
    # Starts with a letter, as the Service of that name must.
    return re.sub(r"^[^a-z]+", "", words)[:NAME_LENGTH].strip("-") or "model"


def resource(answers: Answers) -> dict[str, Any]:
    return dict(yaml.safe_load(text(answers)))


def text(answers: Answers) -> str:
    row = ACCELERATORS[cast(AcceleratorKind, answers.accelerator)]
    pool_notes = _pool_notes(answers)
    return f"""\
# {answers.engine} serves {_comment(answers.model)} on {answers.accelerator}. Apply it: kubectl apply -f FILE
# Every field there is: kubectl explain mmrd.spec --recursive
apiVersion: mmrouter.io/v1alpha1
kind: MMRouterDeployment
metadata:
  # Clients in the cluster talk to http://NAME.NAMESPACE.svc and write the name into `model`.
  name: {_quoted(answers.object_name)}
spec:
  model:
    id: {_quoted(answers.model)}
    # Pods that start at different times must load the same weights: pin the commit that you tested.
    # revision: COMMIT
    # Without a volume every pod downloads the weights. A claim that many nodes can read makes starts fast:
    # volume: {{persistentVolumeClaim: {{claimName: weights}}}}
    # For a repository that is not public:
    # tokenSecret: {{name: hub, key: token}}
  engine:
    type: {answers.engine}
{_image_lines(answers)}\
  frontend:
    # Two, so that a lost node or a rollout does not interrupt clients.
    replicas: 2
    # Without keys, every client that reaches the endpoint may use it, and all share one cache:
    # apiKeys: {{secret: {{name: tenants}}}}
    # Without TLS, prompts and keys cross the network as plain text:
    # service: {{port: 443}}
    # tls: {{secretName: certificate}}
  routing:
    media:
      # Images come inline, as data: URIs. `public` lets frontends fetch URLs; `allowList` only those that you name.
      fetch: dataOnly
  pools:
  - name: worker
    role: worker
    replicas: {answers.replicas}
    accelerator: {{kind: {answers.accelerator}}}\
{f"   # takes 1 {row.resource} per pod; `count` for more" if row.resource else ""}
{pool_notes}"""


def write(path: Path, answers: Answers, *, force: bool) -> None:
    """Write the file. Raises ``FileExistsError`` where there is one and ``force`` is not given, and ``OSError``."""
    # Exclusive creation, because another process may create the file meanwhile.
    with path.open("w" if force else "x") as file:
        file.write(text(answers))


def _pool_notes(answers: Answers) -> str:
    if answers.accelerator == "cpu":
        return (
            "    # Without limits an engine takes what the node has. Say what yours needs:\n"
            "    # resources: {requests: {cpu: 8, memory: 32Gi}, limits: {memory: 32Gi}}\n"
        )
    return (
        "    # One engine over several devices: parallelism: {tensor: 2}, and accelerator.count: 2 beside it.\n"
        "    # Follow the load: autoscaling: {minReplicas: 1, maxReplicas: 8}\n"
    )


def _image_lines(answers: Answers) -> str:
    if answers.image:
        return f"    image: {_quoted(answers.image)}\n"
    if answers.needs_image:
        return (
            f"    # No image of {answers.engine} for {answers.accelerator} is published: put your own here.\n"
            f"    image: registry.example/{answers.engine}-{answers.accelerator}:{ENGINE_VERSIONS[answers.engine]}\n"
        )
    return f"    # image: {_published(answers.engine, answers.accelerator)}   # the default\n"


def _published(engine_type: str, kind: str) -> str:
    return ACCELERATORS[cast(AcceleratorKind, kind)].images.get(engine_type, "")


def _quoted(value: str) -> str:
    """Return a text as YAML, quoted unless every YAML version reads it as that text."""
    if _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT:
        return value
    # JSON's quoting is valid YAML; unprintable characters are escaped as in YAML.
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in json.dumps(value, ensure_ascii=False))


def _comment(value: str) -> str:
    """Return a text that stays within a line of comment."""
    return value if value.isprintable() else ascii(value)
