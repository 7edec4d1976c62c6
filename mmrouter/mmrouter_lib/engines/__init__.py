"""Engine adapters: launch flags, event decoding, request rewriting and metric names of each engine type."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from mmrouter_lib.engines.base.adapter import EngineAdapter
from mmrouter_lib.engines.sglang.adapter import SGLANG
from mmrouter_lib.engines.vllm.adapter import VLLM

if TYPE_CHECKING:
    from mmrouter_lib.api import MMRouterDeployment

__all__ = ["ADAPTERS", "EngineAdapter", "adapter", "answering_args", "answering_variables", "storing_pools"]

ADAPTERS: Final[Mapping[str, EngineAdapter]] = {adapter.type: adapter for adapter in (VLLM, SGLANG)}


def adapter(engine_type: str) -> EngineAdapter:
    """Return the adapter of ``spec.engine.type``. Raises ``ValueError`` for another engine."""
    try:
        return ADAPTERS[engine_type]
    except KeyError:
        raise ValueError(
            f"there is no adapter for engine type {engine_type!r}, only for {' and '.join(ADAPTERS)}"
        ) from None


def answering_args(deployment: "MMRouterDeployment") -> list[list[str]]:
    """Return the users' arguments of the engines that answer clients, one list for each pool."""
    spec = deployment.spec
    return [[*spec.engine.args, *pool.args] for pool in spec.pools if pool.role not in ("encoder", "renderer")]


def answering_variables(deployment: "MMRouterDeployment") -> list[dict[str, str | None]]:
    """Return the variables that pod templates set in the engines that answer clients, one mapping for each pool.

    ``None`` is a value from another object.
    """
    pools = [pool for pool in deployment.spec.pools if pool.role not in ("encoder", "renderer")]
    return [{each["name"]: _value(each) for each in _set_in(pool.pod_template)} for pool in pools]


def storing_pools(deployment: "MMRouterDeployment") -> frozenset[str]:
    """Return the names of the pools whose engines store the responses of ``/v1/responses``.

    A flag in ``args`` decides it, or a variable that only a pod template can set.
    """
    spec, pools = deployment.spec, set[str]()
    stores = adapter(spec.engine.type).stores_responses
    for pool in spec.pools:
        answers, env = pool.role not in ("encoder", "renderer"), _engine_variables(pool.pod_template)
        if answers and stores([*spec.engine.args, *pool.args], env, pool.parallelism.data):
            pools.add(pool.name)
    return frozenset(pools)


def _engine_variables(template: Mapping[str, Any]) -> dict[str, str]:
    return {each["name"]: str(each.get("value", "")) for each in _set_in(template)}


def _value(variable: Mapping[str, Any]) -> str | None:
    return None if "valueFrom" in variable else str(variable.get("value", ""))


def _set_in(template: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the variables that a pod template sets in the engine's container.

    What is malformed sets none, because rendering refuses it with its place; nor does a directive of the patch.
    """
    spec = template.get("spec")
    containers = _mappings(spec.get("containers")) if isinstance(spec, Mapping) else []
    return [
        each
        for container in containers
        if container.get("name") == "engine"
        for each in _mappings(container.get("env"))
        if isinstance(each.get("name"), str) and "$patch" not in each
    ]


def _mappings(value: object) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []
