"""Volumes as folders: an emptyDir is a folder, a Memory one lies on tmpfs, Secrets and ConfigMaps are private files."""

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from mmrouter_cli.local.folders import SHM, LocalError
from mmrouter_cli.local.run_plan import ContainerPlan, PodPlan, RunPlan


def make_volumes(pod: PodPlan, plan: RunPlan, *, folder: Path, tmpfs: Path, base_dir: Path) -> dict[str, Path]:
    """Create a pod's volumes and return volume name -> folder. Relative host paths start at ``base_dir``.

    Raises :class:`LocalError` for a source that is missing or exists in clusters only.
    """
    return {volume["name"]: _make(volume, pod, plan, folder, tmpfs, base_dir) for volume in pod.volumes}


def _make(volume: Mapping[str, Any], pod: PodPlan, plan: RunPlan, folder: Path, tmpfs: Path, base_dir: Path) -> Path:
    where = f"pod {pod.name}, volume {volume['name']}"
    place = folder / str(volume["name"])
    if "emptyDir" in volume:
        if (volume["emptyDir"] or {}).get("medium") == "Memory":
            place = tmpfs / place.name
        place.mkdir(parents=True)
        return place
    if "hostPath" in volume:
        return _host_path(volume["hostPath"], base_dir, tmpfs, where)
    if (claim := (volume.get("persistentVolumeClaim") or {}).get("claimName")) in plan.claims:
        place = tmpfs.parent / "claims" / str(claim)  # one folder for all pods of the run
        place.mkdir(parents=True, exist_ok=True)
        return place
    place.mkdir(parents=True)
    if "projected" in volume:
        for source in volume["projected"].get("sources") or []:
            _write_source(source, plan, place, where)
    elif "configMap" in volume:
        _write_source({"configMap": volume["configMap"]}, plan, place, where)
    elif "secret" in volume:
        secret = volume["secret"]
        _write_source({"secret": {**secret, "name": secret["secretName"]}}, plan, place, where)
    else:
        kind = next((key for key in volume if key != "name"), "nothing")
        raise LocalError(f"{where}: {kind} is not supported locally; for a folder of this machine write hostPath")
    return place


def _host_path(source: Mapping[str, Any], base_dir: Path, tmpfs: Path, where: str) -> Path:
    path = base_dir / str(source["path"])
    if source.get("type") == "DirectoryOrCreate":
        if path.is_relative_to(SHM):
            # Memory shared by pods: a folder of this run, so that it is removed with the run.
            path = tmpfs.parent / "node" / path.relative_to(SHM)
        path.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        hint = ": correct spec.model.volume, which is relative to its file" if where.endswith("volume model") else ""
        raise LocalError(f"{where}: hostPath {path} does not exist{hint}")
    return path.resolve()


def _write_source(source: Mapping[str, Any], plan: RunPlan, place: Path, where: str) -> None:
    for kind, objects in (("configMap", plan.config_maps), ("secret", plan.secrets)):
        if (reference := source.get(kind)) is None:
            continue
        optional = bool(reference.get("optional"))
        data = objects.get(reference["name"])
        if data is None:
            if optional:
                return
            raise LocalError(f"{where}: there is no {kind} {reference['name']} here")
        items = reference.get("items") or [{"key": key, "path": key} for key in data]
        for item in items:
            if item["key"] in data:
                target = place / item["path"]
                if PurePosixPath(item["path"]).is_absolute() or ".." in PurePosixPath(item["path"]).parts:
                    raise LocalError(f"{where}: {item['path']} points outside the volume")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.touch(mode=0o600)
                target.write_bytes(data[item["key"]])
            elif not optional:
                raise LocalError(f"{where}: {kind} {reference['name']} has no key {item['key']}")
        return
    raise LocalError(f"{where}: {', '.join(source)} is not supported locally")


def mount_paths(container: ContainerPlan, volumes: Mapping[str, Path], where: str) -> dict[str, str]:
    """Return mount path -> real folder for one container. Raises :class:`LocalError` for an unknown volume."""
    mounts: dict[str, str] = {}
    for mount in container.mounts:
        if mount.volume not in volumes:
            raise LocalError(f"{where} mounts volume {mount.volume}, which the pod does not have")
        target = volumes[mount.volume] / mount.sub_path
        if not target.exists():
            target.mkdir(parents=True)
        mounts[mount.path] = str(target)
    return mounts


def link_nested(mounts: Mapping[str, str], own: Iterable[Path]) -> None:
    """Link a mount that lies inside another one into the outer folder, if that folder is part of the run.

    A process that uses the outer folder then finds the inner one below it, as in a pod.
    """
    roots = tuple(own)
    for inner, target in mounts.items():
        for outer, folder in mounts.items():
            if inner == outer or not PurePosixPath(inner).is_relative_to(outer):
                continue
            link = Path(folder) / PurePosixPath(inner).relative_to(outer)
            if not any(link.is_relative_to(root) for root in roots) or link.exists():
                continue
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)
