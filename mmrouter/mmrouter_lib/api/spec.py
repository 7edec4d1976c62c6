"""`spec`: the desired state, and the rules between its sections."""

from typing import Final, Literal

from pydantic import Field, model_validator

from mmrouter_lib.api import owned_flag_rules
from mmrouter_lib.api.cross_field_rules import Broken, Resource, broken, rule
from mmrouter_lib.api.engine import EngineSpec, Model
from mmrouter_lib.api.engine_traits import ENGINE_TYPES, engine_is
from mmrouter_lib.api.minor_sections import Frontend, NetworkPolicy, Observability, Sidecar, Verification
from mmrouter_lib.api.pools import Pool, Role
from mmrouter_lib.api.routing import Routing
from mmrouter_lib.api.shared_types import by_key

PICKED: Final[tuple[Role, ...]] = ("renderer", "worker")
"""Roles of pools beside an endpoint picker, which places a request on one engine."""
_BY_REQUEST: Final = "(!has(self.routing.transfer) || self.routing.transfer in ['auto', 'none'])"


def _is_not(transfer: str) -> str:
    """CEL for: ``routing.transfer`` is something else."""
    return f"!has(self.routing.transfer) || self.routing.transfer != '{transfer}'"


def _any(role: Role) -> str:
    """CEL for: a pool of that role is there."""
    return f"self.pools.exists(p, p.role == '{role}')"


class Spec(Resource):
    """One model, one engine type, one frontend, any number of pools."""

    model: Model
    """The weights to serve; the id is immutable."""
    engine: EngineSpec
    """The inference engine."""
    frontend: Frontend = Frontend()
    """The pods that run the router."""
    routing: Routing = Routing()
    """How engines are chosen for requests."""
    pools: list[Pool] = Field(min_length=1, max_length=16, json_schema_extra=by_key("name"))
    """The engines, by role and accelerator; a map by `name`."""
    verification: Verification = Verification()
    """How the exactness of routing is measured."""
    sidecar: Sidecar = Sidecar()
    """The relay of KV events beside every engine."""
    observability: Observability = Observability()
    """Metrics, traces and debugging headers."""
    network_policy: NetworkPolicy = NetworkPolicy()
    """Network policies that isolate the deployment's pods."""
    paused: bool = False
    """Stop all changes to the deployment's objects."""

    @model_validator(mode="after")
    def _names_differ(self) -> "Spec":
        # The API server checks this by itself: the list is a map by name.
        first: dict[str, int] = {}
        for number, pool in enumerate(self.pools):
            if pool.name in first:
                sentence = f"pools[{first[pool.name]}] already has the name {pool.name!r}; names must differ"
                raise broken(f"pools[{number}].name", sentence)
            first[pool.name] = number
        return self

    @rule("pools", f"!{_any('prefill')} || {_any('decode')}")
    def _prefill_has_decode(self) -> bool | Broken:
        """a prefill pool needs a decode pool beside it"""
        return self._together("prefill", "decode")

    @rule("pools", f"!{_any('decode')} || {_any('prefill')}")
    def _decode_has_prefill(self) -> bool | Broken:
        """a decode pool needs a prefill pool beside it"""
        return self._together("decode", "prefill")

    @rule("pools", f"!{_any('worker')} || !{_any('prefill')}")
    def _one_way_to_go(self) -> bool | Broken:
        """worker pools cannot be combined with prefill and decode pools: a request would have two ways to be served"""
        worker = self._first("worker")
        return worker is None or self._first("prefill") is None or Broken(f"pools[{worker}].role")

    @rule("pools", f"{_any('worker')} || {_any('prefill')} || {_any('decode')}")
    def _something_generates(self) -> bool:
        """no pool generates text: add a worker pool, or a prefill and a decode pool"""
        return any(pool.role in ("worker", "prefill", "decode") for pool in self.pools)

    @rule(
        "pools", f"!{_any('encoder')} || self.pools.exists(p, p.role == 'encoder' && (!has(p.weight) || p.weight > 0))"
    )
    def _some_encoder_has_weight(self) -> bool | Broken:
        """one encoder pool must have a weight above 0"""
        weights = [pool.weight for pool in self.pools if pool.role == "encoder"]
        return not weights or any(weights) or Broken(f"pools[{self._first('encoder')}].weight")

    @rule("pools", f"{engine_is(lambda traits: traits.has_renderers)} || !{_any('renderer')}")
    def _renderers_are_supported(self) -> bool | Broken:
        """renderer pools exist for engine type vllm only"""
        renderer = self._first("renderer")
        return ENGINE_TYPES[self.engine.type].has_renderers or renderer is None or Broken(f"pools[{renderer}].role")

    @rule("routing.transfer", f"{engine_is(lambda traits: traits.supports_transfer)} || {_BY_REQUEST}")
    def _transfer_is_supported(self) -> bool:
        """transfer: shm and nixl are for engine type vllm; SGLang engines process images themselves"""
        return ENGINE_TYPES[self.engine.type].supports_transfer or self.routing.hand_over_is_optional

    @rule("routing.transfer", f"{_is_not('nixl')} || {_any('renderer')}")
    def _nixl_has_a_renderer(self) -> bool:
        """transfer: nixl carries images that a renderer has processed: add a renderer pool, or set shm or none"""
        return self.routing.transfer != "nixl" or self._first("renderer") is not None

    @rule("pools", f"{_is_not('shm')} || self.pools.all(p, p.sharedMemory.scope == 'node')")
    def _transfer_has_a_place(self) -> bool | Broken:
        """routing.transfer: shm needs scope: node on every pool"""
        for number, pool in enumerate(self.pools):
            if pool.shared_memory.scope != "node":
                return self.routing.transfer != "shm" or Broken(f"pools[{number}].sharedMemory.scope")
        return True

    @rule(
        "routing.sharedVolume",
        "!has(self.routing.sharedVolume) || self.pools.exists(p, p.sharedMemory.scope == 'node')",
    )
    def _shared_volume_is_mounted(self) -> bool:
        """only pools with sharedMemory.scope: node mount routing.sharedVolume, and no pool has it"""
        return self.routing.shared_volume is None or any(pool.shared_memory.scope == "node" for pool in self.pools)

    @rule("engine.embeddingVolume", f"!has(self.engine.embeddingVolume) || {_any('encoder')}")
    def _embeddings_have_an_encoder(self) -> bool:
        """engine.embeddingVolume is for the embeddings of encoders, and no pool has role: encoder"""
        return self.engine.embedding_volume is None or self._first("encoder") is not None

    @rule(
        "engine.tls",
        f"{engine_is(lambda traits: traits.encoders_serve_tls)} || !has(self.engine.tls) || !{_any('encoder')}",
    )
    def _encoders_serve_tls(self) -> bool:
        """SGLang's encoders serve no TLS, so images would reach them unencrypted: use engine.tls without encoders"""
        supported = ENGINE_TYPES[self.engine.type].encoders_serve_tls
        return supported or self.engine.tls is None or self._first("encoder") is None

    @rule("pools", f"self.frontend.mode != 'endpointPicker' || self.pools.all(p, p.role in {list(PICKED)})")
    def _picker_has_no_stages(self) -> bool | Broken:
        """an endpoint picker chooses one engine per request: with stages set frontend.mode to frontendPicker"""
        staged = next((number for number, pool in enumerate(self.pools) if pool.role not in PICKED), None)
        return self.frontend.mode != "endpointPicker" or staged is None or Broken(f"pools[{staged}].role")

    @rule("engine.tls", "self.frontend.mode != 'endpointPicker' || !has(self.engine.tls)")
    def _picker_reaches_engines_plainly(self) -> bool:
        """with frontend.mode: endpointPicker the gateway connects to the engines, and it does not know their CA"""
        return self.frontend.mode != "endpointPicker" or self.engine.tls is None

    @rule("routing.transfer", f"self.frontend.mode != 'endpointPicker' || {_BY_REQUEST}")
    def _picker_sends_bytes(self) -> bool:
        """with frontend.mode: endpointPicker images travel in the request: set transfer to auto or none"""
        return self.frontend.mode != "endpointPicker" or self.routing.hand_over_is_optional

    @property
    def transfer(self) -> Literal["none", "shm", "nixl"]:
        """How images may reach engines: ``routing.transfer``, where ``auto`` is what the pools make possible."""
        if self.frontend.mode == "endpointPicker":
            return "none"
        if self.routing.transfer is not None and self.routing.transfer != "auto":
            return self.routing.transfer
        shares = all(pool.shared_memory.scope == "node" for pool in self.pools)
        return "shm" if shares and ENGINE_TYPES[self.engine.type].supports_transfer else "none"

    @model_validator(mode="after")
    def _own_flags(self) -> "Spec":
        for number, pool in enumerate(self.pools):
            owned_flag_rules.refuse_owned(f"pools[{number}].args", pool.args, self.engine.type)
        return self

    @classmethod
    def validations(cls) -> list[dict[str, str]]:
        """Return the rules, with those for owned flags in the pools' ``args``."""
        return [*super().validations(), *owned_flag_rules.pool_validations()]

    def _first(self, role: Role) -> int | None:
        return next((number for number, pool in enumerate(self.pools) if pool.role == role), None)

    def _together(self, role: Role, other: Role) -> bool | Broken:
        first = self._first(role)
        return first is None or self._first(other) is not None or Broken(f"pools[{first}].role")
