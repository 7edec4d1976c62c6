"""How vLLM's encoders hand embeddings to the engines that compute prompts: a connector that all of their pools have.

vLLM's ECCPUConnector keeps embeddings in main memory and sends them by NIXL; it runs on accelerators only, because it
needs the second model runner. ECExampleConnector reads and writes files, on every device. Pools of one kind of
accelerator use the first; else files lie in the node's memory if all pools share it, else on a volume.
``engine.ecConnector`` replaces the choice (docs/engine-facts/vllm.md#encoder-disaggregation).
"""

from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment, Pool, quantity_bytes
from mmrouter_lib.engines.base.launch import DEVICES, SIDE_CHANNEL_PORT, EmbeddingTransfer, LaunchError
from mmrouter_lib.pod_paths import EMBEDDINGS_DIR, SHARED_DIR

_FILES: Final = "ECExampleConnector"


def embedding_transfer(dep: MMRouterDeployment) -> EmbeddingTransfer | None:
    """Return the transfer between the pools of a deployment; ``None`` without encoders."""
    users = tuple(pool for pool in dep.spec.pools if pool.role in ("encoder", "worker", "prefill"))
    if all(pool.role != "encoder" for pool in users):
        return None
    engine, names = dep.spec.engine, tuple(pool.name for pool in users)
    if engine.ec_connector:
        folder = "" if engine.embedding_volume is None else EMBEDDINGS_DIR
        name = str(engine.ec_connector.get("ec_connector", ""))
        return EmbeddingTransfer(name, folder, names, "set in engine.ecConnector")
    kinds = sorted({pool.accelerator.kind for pool in users})
    if engine.embedding_volume is not None:
        return EmbeddingTransfer(_FILES, EMBEDDINGS_DIR, names, "files on engine.embeddingVolume")
    if len(kinds) == 1 and DEVICES[kinds[0]].vllm_embeddings:
        return EmbeddingTransfer("ECCPUConnector", "", names, f"main memory and NIXL, as all pools are {kinds[0]}")
    because = f"as the pools are {' and '.join(kinds)}" if len(kinds) > 1 else f"the only way on {kinds[0]}"
    if all(pool.shared_memory.scope == "node" for pool in users):
        return EmbeddingTransfer(
            _FILES, SHARED_DIR, names, f"files in the memory that the pods of a node share, {because}"
        )
    return EmbeddingTransfer(
        _FILES,
        EMBEDDINGS_DIR,
        names,
        f"files on a ReadWriteMany volume, {because}; sharedMemory.scope: node on all of them keeps files in memory, "
        "engine.embeddingVolume names another volume",
    )


def ec_connector(dep: MMRouterDeployment, pool: Pool) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the JSON of ``--ec-transfer-config`` and the environment of a pool with a part in the transfer.

    Raises ``LaunchError`` for a connector without a name, and for an encoder with ranks that cannot hand over.
    """
    role = "ec_producer" if pool.role == "encoder" else "ec_consumer"
    if chosen := dep.spec.engine.ec_connector:
        if not isinstance(chosen.get("ec_connector"), str):
            raise LaunchError("engine.ecConnector", "name vLLM's connector in `ec_connector`")
        return {"ec_role": role, **chosen}, {}
    transfer = embedding_transfer(dep)
    assert transfer is not None  # the deployment has encoders
    config = {"ec_connector": transfer.connector, "ec_role": role}
    if transfer.folder:
        return {**config, "ec_connector_extra_config": {"shared_storage_path": transfer.folder}}, {}
    if role == "ec_producer" and pool.parallelism.data > 1:
        raise LaunchError("parallelism.data", "an encoder hands over from one rank only: use replicas instead")
    # Embeddings use half of the pod's /dev/shm; the engine's own processes use the other half.
    extra = {"ec_cpu_bytes": quantity_bytes(pool.shared_memory.size) // 2, "ec_enable_nixl": True}
    env = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    if role == "ec_producer":
        env |= {"VLLM_EC_SIDE_CHANNEL_HOST": "$(POD_IP)", "VLLM_EC_SIDE_CHANNEL_PORT": str(SIDE_CHANNEL_PORT)}
    return {**config, "ec_connector_extra_config": extra}, env


def embedding_cache_bytes(dep: MMRouterDeployment, pool: Pool) -> int | None:
    """Return how many bytes of embeddings an encoder keeps for others, ``None`` where its connector sets no size."""
    if pool.role != "encoder":
        return None
    try:
        config, _ = ec_connector(dep, pool)
    except LaunchError:
        return None
    extra = config.get("ec_connector_extra_config")
    size = extra.get("ec_cpu_bytes") if isinstance(extra, dict) else None
    return size if isinstance(size, int) and size > 0 else None
