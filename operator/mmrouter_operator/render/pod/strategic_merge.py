"""Strategic merge of a user's `podTemplate` over a rendered pod template, as `kubectl patch --type=strategic` does it.

Maps merge, `null` deletes a key, lists of objects merge by their merge key where Kubernetes declares one; other lists
are replaced. Directives: `$patch: delete | replace` in a map or a list element, and `$retainKeys`. As with kubectl,
elements that the patch brings come before those that only the original has, unless both are in the original.
"""

import copy
from collections.abc import Sequence
from typing import Any

Path = tuple[str, ...]

_CONTAINER_KEYS = {"env": "name", "ports": "containerPort", "volumeMounts": "mountPath", "volumeDevices": "devicePath"}
_CONTAINER_LISTS = ("containers", "initContainers", "ephemeralContainers")

MERGE_KEYS: dict[Path, str] = {
    ("metadata", "ownerReferences"): "uid",
    ("spec", "hostAliases"): "ip",
    ("spec", "imagePullSecrets"): "name",
    ("spec", "resourceClaims"): "name",
    ("spec", "schedulingGates"): "name",
    ("spec", "topologySpreadConstraints"): "topologyKey",
    ("spec", "volumes"): "name",
    **{("spec", containers): "name" for containers in _CONTAINER_LISTS},
    **{("spec", c, field): key for c in _CONTAINER_LISTS for field, key in _CONTAINER_KEYS.items()},
}
"""Lists in a pod template that merge by key (patchMergeKey of the API types); a path holds no list positions."""

MERGED_SCALARS: frozenset[Path] = frozenset({("metadata", "finalizers")})
"""Lists of texts that are united instead of replaced."""

_DIRECTIVE = "$patch"
_RETAIN = "$retainKeys"


class OverlayError(ValueError):
    """The patch is malformed. ``path`` names the place within it."""

    def __init__(self, path: str, message: str) -> None:
        self.path = path
        super().__init__(message)


def overlay(template: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Return a new pod template with ``patch`` merged over ``template``. Raises :class:`OverlayError`."""
    for key in patch:
        if key not in ("metadata", "spec", _DIRECTIVE, _RETAIN):
            raise OverlayError(key, "a pod template has `metadata` and `spec` only")
    return _merge_map(copy.deepcopy(template), copy.deepcopy(patch), ())


def _merge_map(original: dict[str, Any], patch: dict[str, Any], path: Path) -> dict[str, Any]:
    if _DIRECTIVE in patch:
        directive = patch.pop(_DIRECTIVE)
        if directive == "replace":
            return _alone_map(patch, path)
        if directive == "delete":
            return {}
        raise _bad_directive(directive, path)
    if _RETAIN in patch:
        _retain(original, patch, path)
    for key, value in patch.items():
        here = (*path, key)
        if key.startswith("$"):
            raise OverlayError(_text(here), f"directive {key} is not supported")
        if value is None:
            original.pop(key, None)
            continue
        current = original.get(key)
        if isinstance(current, dict) and isinstance(value, dict):
            original[key] = _merge_map(current, value, here)
        elif isinstance(current, list) and isinstance(value, list):
            original[key] = _merge_list(current, value, here)
        elif isinstance(current, dict | list):
            raise OverlayError(_text(here), f"is {described(current)}, not {described(value)}")
        else:
            original[key] = _alone(value, here)
    return original


def _retain(original: dict[str, Any], patch: dict[str, Any], path: Path) -> None:
    keys = patch.pop(_RETAIN)
    if not isinstance(keys, list):
        raise OverlayError(_text((*path, _RETAIN)), "is a list of keys")
    for key in patch:
        if key not in keys:
            raise OverlayError(_text((*path, key)), f"{_RETAIN} must list every key that the patch sets")
    for key in [key for key in original if key not in keys]:
        del original[key]


def _merge_list(original: list[Any], patch: list[Any], path: Path) -> list[Any]:
    if path in MERGED_SCALARS:
        for item in patch:
            if not isinstance(item, str):
                raise OverlayError(_text(path), f"holds texts, not {described(item)}")
        return _ordered(original, list(dict.fromkeys([*original, *patch])), patch, None)
    merge_key = MERGE_KEYS.get(path)
    if merge_key is None:
        return [_alone(item, path) for item in patch]
    replace = False
    plain: list[dict[str, Any]] = []
    kept = list(original)
    for item in patch:
        if not isinstance(item, dict):
            raise OverlayError(_text(path), f"holds objects, not {described(item)}")
        directive = item.get(_DIRECTIVE)
        if directive is None:
            plain.append(item)
        elif directive == "replace":
            replace = True
        elif directive == "delete":
            name = _key_of(item, merge_key, path)
            kept = [other for other in kept if other.get(merge_key) != name]
        else:
            raise _bad_directive(directive, path)
    if replace:
        return [_alone_map(item, path) for item in plain if _key_of(item, merge_key, path) is not None]
    merged = list(kept)
    for item in plain:
        name = _key_of(item, merge_key, path)
        for position, other in enumerate(merged):
            if other.get(merge_key) == name:
                merged[position] = _merge_map(other, item, path)
                break
        else:
            merged.append(_alone(item, path))
    return _ordered(kept, merged, plain, merge_key)


def _ordered(original: list[Any], merged: list[Any], patch: Sequence[Any], merge_key: str | None) -> list[Any]:
    """Return ``merged`` in kubectl's order: patched items as in the patch, the others where they were among them."""

    def name(item: Any) -> Any:
        return item if merge_key is None else item.get(merge_key)

    place = {name(item): position for position, item in enumerate(original)}
    wanted = {name(item): position for position, item in enumerate(patch)}
    patched = sorted((item for item in merged if name(item) in wanted), key=lambda item: wanted[name(item)])
    others = [item for item in merged if name(item) not in wanted]
    result: list[Any] = []
    while patched and others:
        left, right = place.get(name(others[0])), place.get(name(patched[0]))
        if left is not None and right is not None and left < right:
            result.append(others.pop(0))
        else:
            result.append(patched.pop(0))
    return result + others + patched


def _alone(value: Any, path: Path) -> Any:
    """Return a value that has nothing to merge with: nulls and deletions have nothing to delete."""
    if isinstance(value, dict):
        return _alone_map(value, path)
    if not isinstance(value, list):
        return value
    merge_key = MERGE_KEYS.get(path)
    kept = []
    for item in value:
        if merge_key is not None:
            if not isinstance(item, dict):
                raise OverlayError(_text(path), f"holds objects, not {described(item)}")
            if item.get(_DIRECTIVE) in ("delete", "replace"):
                continue
            _key_of(item, merge_key, path)
        kept.append(_alone(item, path))
    return kept


def _alone_map(value: dict[str, Any], path: Path) -> dict[str, Any]:
    return {
        key: _alone(item, (*path, key))
        for key, item in value.items()
        if item is not None and key not in (_DIRECTIVE, _RETAIN)
    }


def _key_of(item: dict[str, Any], merge_key: str, path: Path) -> Any:
    if merge_key not in item:
        raise OverlayError(_text(path), f"every element needs its `{merge_key}`, which says what it merges with")
    key = item[merge_key]
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise OverlayError(
            _text((*path, merge_key)), f"says what an element merges with, as a text or a number, not {described(key)}"
        )
    return key


def _bad_directive(directive: Any, path: Path) -> OverlayError:
    return OverlayError(_text((*path, _DIRECTIVE)), f"is `delete` or `replace`, not {directive!r}")


def described(value: Any) -> str:
    """Return what a value is, as a part of a sentence."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return "null" if value is None else f"{value!r:.80}"


def _text(path: Path) -> str:
    return ".".join(path)
