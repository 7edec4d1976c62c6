"""`spec`: everything a user says, and the rules that hold between its sections."""

from collections.abc import Mapping, Sequence

from pydantic import Field, model_validator

from mmrouter.api.base import Resource, broken
from mmrouter.api.engine import Engine, EngineType
from mmrouter.api.frontend import Frontend
from mmrouter.api.model import Model
from mmrouter.api.operations import NetworkPolicy, Observability, Sidecar, Verification
from mmrouter.api.pools import Pool
from mmrouter.api.routing import Routing


class Spec(Resource):
    """One model, one engine type, one frontend, any number of pools."""

    model: Model
    """Which weights are served. Immutable in its id."""
    engine: Engine
    """What runs the model."""
    frontend: Frontend = Frontend()
    """The pods that run the router."""
    routing: Routing = Routing()
    """How a request finds its engine."""
    pools: list[Pool] = Field(min_length=1, max_length=16)
    """The engines, by role and accelerator; a map by `name`."""
    verification: Verification = Verification()
    """How the exactness of routing is measured."""
    sidecar: Sidecar = Sidecar()
    """The relay of KV events beside every engine."""
    observability: Observability = Observability()
    """What is told to the outside."""
    network_policy: NetworkPolicy = NetworkPolicy()
    """Whether pods may be reached by their own kind only."""
    paused: bool = False
    """The operator leaves the children of a paused deployment as they are."""

    @model_validator(mode="after")
    def _pools_fit(self) -> "Spec":
        first: dict[str, int] = {}
        for number, pool in enumerate(self.pools):
            if pool.name in first:
                raise broken(
                    f"pools[{number}].name",
                    f"pools[{first[pool.name]}] is called {pool.name!r} already; names must differ",
                )
            first[pool.name] = number
        roles = {pool.role: number for number, pool in reversed(list(enumerate(self.pools)))}
        if "prefill" in roles and "decode" not in roles:
            raise broken(f"pools[{roles['prefill']}].role", "a prefill pool needs a decode pool beside it")
        if "decode" in roles and "prefill" not in roles:
            raise broken(f"pools[{roles['decode']}].role", "a decode pool needs a prefill pool beside it")
        if "worker" in roles and "prefill" in roles:
            raise broken(
                f"pools[{roles['worker']}].role",
                "worker pools do not stand beside prefill and decode pools: a request would have two ways to go",
            )
        if "worker" not in roles and "prefill" not in roles:
            raise broken("pools", "nothing generates text: add a worker pool, or a prefill and a decode pool")
        encoders = [pool for pool in self.pools if pool.role == "encoder"]
        if encoders and not any(pool.weight for pool in encoders):
            raise broken(f"pools[{roles['encoder']}].weight", "one encoder pool must have a weight above 0")
        if "renderer" in roles and self.engine.type != "vllm":
            raise broken(f"pools[{roles['renderer']}].role", "renderer pools exist for engine type vllm only")
        return self

    @model_validator(mode="after")
    def _transfer_has_a_place(self) -> "Spec":
        if self.routing.transfer == "shm":
            for number, pool in enumerate(self.pools):
                if pool.role in ("encoder", "prefill", "worker") and pool.shared_memory.scope != "node":
                    raise broken(
                        f"pools[{number}].sharedMemory.scope",
                        "routing.transfer: shm needs scope: node on every encoder, prefill and worker pool",
                    )
        return self

    @model_validator(mode="after")
    def _own_flags(self) -> "Spec":
        _refuse_owned("engine.args", self.engine.args, self.engine.type)
        for number, pool in enumerate(self.pools):
            _refuse_owned(f"pools[{number}].args", pool.args, self.engine.type)
        return self


def _owned_flags(engine: EngineType) -> Mapping[str, str]:
    # The engine adapters import these models, so the arrow back is taken at call time.
    match engine:
        case "vllm":
            from mmrouter.engines.vllm_launch import OWNED_FLAGS as OF_VLLM  # noqa: PLC0415

            return OF_VLLM
        case "sglang":
            from mmrouter.engines.sglang_launch import OWNED_FLAGS as OF_SGLANG  # noqa: PLC0415

            return OF_SGLANG


def _refuse_owned(path: str, args: Sequence[str], engine: EngineType) -> None:
    """Raise for an argument that is an owned flag, in any spelling engines take."""
    if not args:
        return
    owned = _owned_flags(engine)
    for number, arg in enumerate(args):
        for name, field in owned.items():
            if _is_flag(arg, name):
                instead = f"; use spec.{field}" if field else ""
                raise broken(f"{path}[{number}]", f"{arg:.80} sets {name}, which is not yours to set here{instead}")


def _is_flag(arg: str, name: str) -> bool:
    """Whether ``arg`` sets the flag ``name``: `-x`, `--a-b`, `--a_b`, `--a-b=1`, `--a-b.c`, `--no-a-b`, shortened."""
    flag = arg.split("=", 1)[0]
    if not flag.startswith("--"):
        return flag == name
    flag = flag.split(".", 1)[0].replace("_", "-").lower()
    # Argument parsers take an unambiguous beginning for the whole flag.
    return any(
        spelling == name or (len(spelling) > len("--") and name.startswith(spelling))
        for spelling in (flag, flag.replace("--no-", "--", 1))
    )
