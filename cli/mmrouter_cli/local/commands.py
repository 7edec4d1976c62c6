"""What a container's command means on this machine, and what of this process's environment it may see."""

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mmrouter_cli.local.folders import LocalError

Engines = Literal["sim", "path"]
ENGINE_COMMANDS = ("vllm", "sglang")

_INHERITED = ("PATH", "LANG", "TZ", "TERM", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
_INHERITED_PREFIXES = (
    "LC_",
    "CUDA_",
    "NVIDIA_",
    "HIP_",
    "HSA_",
    "ROCR_",
    "ZE_",
    "ONEAPI_",
    "HF_",
    "VLLM_",
    "MMROUTER_SIM_",
)


@dataclass(frozen=True, slots=True)
class Commands:
    """Where commands come from. ``engine_folder`` is looked into first; ``None`` leaves the search to PATH."""

    engine_folder: Path | None
    hint: str

    def path(self, env: Mapping[str, str]) -> str:
        """Return a process's PATH: engines, and the Python that they run in, are found as in their own image."""
        own = env.get("PATH", os.defpath)
        return own if self.engine_folder is None else f"{self.engine_folder}{os.pathsep}{own}"

    def resolve(self, command: str, env: Mapping[str, str]) -> list[str]:
        """Return the beginning of a command line that this machine can run. Raises :class:`LocalError`."""
        if command == "mmrouter":
            return [sys.executable, "-m", "mmrouter_cli"]
        if command == "python3":
            # An engine's image has one; this machine may have ours alone.
            return [shutil.which(command, path=self.path(env)) or sys.executable]
        search = env.get("PATH", os.defpath)
        if command in ENGINE_COMMANDS and self.engine_folder is not None:
            search = str(self.engine_folder)
        found = shutil.which(command, path=search)
        if found is None:
            hint = self.hint if command in ENGINE_COMMANDS else ""
            where = "on PATH" if hint else f"in {search}"
            raise LocalError(f"there is no command {command} {where}{hint}")
        return [found]


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
    """Return what every process may see of our own environment: places, languages, devices, and nothing private."""
    return {
        name: value for name, value in os.environ.items() if name in _INHERITED or name.startswith(_INHERITED_PREFIXES)
    }
