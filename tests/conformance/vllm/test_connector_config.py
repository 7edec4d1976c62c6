"""vLLM's own parser and configuration classes take the default connector for embeddings, as the operator renders it.

ECCPUConnector copies between an accelerator and main memory, so on a CPU only its scheduler's part can run: it makes
the shared region and opens the side channel. The flags come from a rendered resource.
"""

from pathlib import Path
from typing import Any

import pytest
from conformance.conftest import Shrunk
from conformance.engines import REPOSITORY
from conformance.own_code import answer_of

from mmrouter_lib.api import parse_deployment
from mmrouter_lib.engines.base.launch import SIDE_CHANNEL_PORT
from mmrouter_lib.engines.vllm.launch import transfer_flags

PROGRAM = """
import json, os, sys
os.environ.update(json.load(sys.stdin))
import vllm.config.vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

vllm.config.vllm.HAS_TRITON = True  # what an accelerator's build has, and all that the configuration lacks here
parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(sys.argv[1:])
config = EngineArgs.from_cli_args(parsed).create_engine_config()
made = ECConnectorFactory.create_connector(config, ECConnectorRole.SCHEDULER)
scheduler = made.connector_scheduler
region = scheduler._region
answer = json.dumps({
    "class": type(made).__name__,
    "role": [config.ec_transfer_config.is_ec_producer, config.ec_transfer_config.is_ec_consumer],
    "bytes": region.num_blocks * region.block_size_bytes,
    "peer": [scheduler._peer_host, scheduler._peer_port],
    "nixl": scheduler._nixl_enabled,
})
made.shutdown()
print("\\n" + answer)
"""


@pytest.mark.parametrize("role", ["encoder", "worker"])
def test_the_default_connector_is_configured_by_vllm_itself(vllm_env: Path, shrunk: Shrunk, role: str) -> None:
    pools = [
        {"name": name, "role": name, "accelerator": {"kind": "nvidia"}, "sharedMemory": {"size": "128Mi"}}
        for name in ("encoder", "worker")
    ]
    spec: dict[str, Any] = {"model": {"id": REPOSITORY}, "engine": {"type": "vllm"}, "pools": pools}
    kind = {"apiVersion": "mmrouter.io/v1alpha1", "kind": "MMRouterDeployment"}
    dep = parse_deployment({**kind, "metadata": {"name": "demo"}, "spec": spec})
    flags, env = transfer_flags(dep, dep.pool(role))
    rendered = {name: value.replace("$(POD_IP)", "127.0.0.1") for name, value in env.items()}
    argv = ["--model", str(shrunk(REPOSITORY)), "--max-model-len", "2048", "--load-format", "dummy", *flags]
    made = answer_of(vllm_env, ["-c", PROGRAM, *argv], rendered)
    assert made["class"] == "ECCPUConnector"
    assert made["role"] == [role == "encoder", role == "worker"]
    assert made["nixl"] is True
    assert made["peer"] == (["127.0.0.1", SIDE_CHANNEL_PORT] if role == "encoder" else [None, None])
    assert 60 * 2**20 < made["bytes"] <= 64 * 2**20, "half of the pod's shared memory"
