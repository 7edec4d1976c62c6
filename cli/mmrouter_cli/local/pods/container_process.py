"""A container's commands and environment on this machine: commands, variables, and paths of mounts."""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mmrouter_cli.local.folders import LocalError
from mmrouter_cli.local.run_plan import PodPlan, RunPlan

LOOPBACK = "POD_LOOPBACK"
"""Variable with a local pod's own loopback address, unlike in a cluster (docs/architecture.md)."""

LOCAL = {"MMROUTER_DISCOVERY": "file", "MMROUTER_BIND": "pod"}
"""Without an API frontends read ``workers.json``; pods share one network, so each binds to its own address."""

_REFERENCE = re.compile(r"\$(?:\$|\(([^)]*)\))")
_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace ``$(NAME)`` by known variables and ``$$`` by a dollar sign; unknown references stay."""
    return _REFERENCE.sub(lambda match: "$" if match[1] is None else variables.get(match[1], match[0]), text)


def resolve_env(
    env: Iterable[Mapping[str, Any]], env_from: Iterable[Mapping[str, Any]], pod: PodPlan, plan: RunPlan
) -> dict[str, str]:
    """Return a container's environment. A value sees the variables before it. Raises :class:`LocalError`."""
    values: dict[str, str] = {}
    for source in env_from:
        for kind in ("configMapRef", "secretRef"):
            data = _object(plan, source[kind], kind) if kind in source else {}
            values |= {source.get("prefix", "") + key: raw.decode() for key, raw in data.items()}
    for item in env:
        name = item["name"]
        if name == LOOPBACK:
            values[name] = pod.ip
        elif name in LOCAL:
            values[name] = LOCAL[name]
        elif "valueFrom" in item:
            if (value := _from(item["valueFrom"], name, pod, plan)) is not None:
                values[name] = value
        else:
            values[name] = expand(str(item.get("value", "")), values)
    return values


def _from(source: Mapping[str, Any], name: str, pod: PodPlan, plan: RunPlan) -> str | None:
    if "fieldRef" in source:
        return _field(source["fieldRef"]["fieldPath"], name, pod)
    for kind in ("configMapKeyRef", "secretKeyRef"):
        if (reference := source.get(kind)) is not None:
            data = _object(plan, reference, kind)
            if reference["key"] in data:
                return data[reference["key"]].decode()
            if reference.get("optional"):
                return None
            raise LocalError(f"environment variable {name}: {reference['name']} has no key {reference['key']}")
    raise LocalError(f"environment variable {name}: {', '.join(source)} is not supported locally")


def _object(plan: RunPlan, reference: Mapping[str, Any], kind: str) -> Mapping[str, bytes]:
    what, objects = ("Secret", plan.secrets) if kind.startswith("secret") else ("ConfigMap", plan.config_maps)
    if reference["name"] not in objects and not reference.get("optional"):
        raise LocalError(f"there is no {what} {reference['name']} here")
    return objects.get(reference["name"], {})


def _field(path: str, name: str, pod: PodPlan) -> str:
    fields = {"metadata.name": pod.name, "metadata.namespace": pod.namespace, "metadata.uid": pod.uid}
    fields |= {"spec.nodeName": pod.node, "spec.serviceAccountName": "default"}
    fields |= dict.fromkeys(("status.hostIP", "status.podIP", "status.podIPs"), pod.ip)
    if path in fields:
        return fields[path]
    match = _SUBSCRIPT.fullmatch(path)
    if match is None:
        raise LocalError(f"environment variable {name}: the field {path} is not known locally")
    return (pod.labels if match[1] == "labels" else pod.annotations).get(match[2], "")


def rewriter(mounts: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that replaces mount paths by real folders wherever they occur as paths in a text.

    The longest mount path wins, only complete path components match (``/tmp`` is no part of ``/tmpfs`` nor of
    ``/a/tmp``), and replacements are not replaced again.
    """
    if not mounts:
        return lambda text: text
    paths = "|".join(re.escape(path) for path in sorted(mounts, key=len, reverse=True))
    pattern = re.compile(rf"(?<![\w./~-])(?:{paths})(?![\w.-])")
    return lambda text: pattern.sub(lambda match: mounts[match[0]], text)


Engines = Literal["sim", "path"]
ENGINE_COMMANDS = ("vllm", "sglang")

_INHERITED = ("PATH", "LANG", "TZ", "TERM", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "MMROUTER_LOG_LEVEL")
_DEVICES = ("CUDA_", "NVIDIA_", "HIP_", "HSA_", "ROCR_", "ZE_", "ONEAPI_", "HABANA_")
_INHERITED_PREFIXES = ("LC_", *_DEVICES, "HF_", "VLLM_", "MMROUTER_SIM_")


@dataclass(frozen=True, slots=True)
class Commands:
    """Resolves commands; ``engine_folder`` is searched first, ``None`` searches PATH only."""

    engine_folder: Path | None
    hint: str

    def path(self, env: Mapping[str, str]) -> str:
        """Return a process's PATH, in which engines and their Python come first, as in their own image."""
        own = env.get("PATH", os.defpath)
        return own if self.engine_folder is None else f"{self.engine_folder}{os.pathsep}{own}"

    def resolve(self, command: str, env: Mapping[str, str]) -> list[str]:
        """Return the start of a command line for this machine. Raises :class:`LocalError`."""
        if command == "mmrouter":
            return [sys.executable, "-m", "mmrouter_cli"]
        if command == "python3":
            # An engine's image has a python3; this machine may only have ours.
            return [shutil.which(command, path=self.path(env)) or sys.executable]
        search = env.get("PATH", os.defpath)
        if command in ENGINE_COMMANDS and self.engine_folder is not None:
            search = str(self.engine_folder)
        program = shutil.which(command, path=search)
        if program is None:
            hint = self.hint if command in ENGINE_COMMANDS else ""
            where = "on PATH" if hint else f"in {search}"
            raise LocalError(f"there is no command {command} {where}{hint}")
        return [program]


def engine_commands(engines: Engines, engine_env: Path | None, folder: Path) -> Commands:
    """Return the commands of a run; simulated engines are installed into ``folder``. Raises :class:`LocalError`."""
    if engines == "sim":
        if engine_env is not None:
            raise LocalError("an engine environment is for real engines: add --engines path")
        from mmrouter_sim import install

        install(folder)
        return Commands(folder, "")
    if engine_env is None:
        return Commands(None, "; name the environment that has it with --engine-env")
    bin_folder = engine_env.expanduser().resolve() / "bin"
    if not bin_folder.is_dir():
        raise LocalError(f"{engine_env} is not an environment: it has no folder bin")
    return Commands(bin_folder, "")


def inherited_env() -> dict[str, str]:
    """Return the inherited environment of every process: paths, locale and devices, nothing private."""
    return {name: v for name, v in os.environ.items() if name in _INHERITED or name.startswith(_INHERITED_PREFIXES)}
