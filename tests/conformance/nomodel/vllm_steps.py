"""Run requests through vLLM's own scheduler and KV cache manager, without a model. Runs in the engine's environment.

    python vllm_steps.py MODEL_FOLDER

Only the forward pass is missing: each token is a function of its place. Messages are read from standard input and
answered on standard output (``frames.py``). A message with ``layers`` (a list of kind and fields), ``block_size``,
``blocks``, ``drafter`` (a method or empty), ``offload`` (empty, or ``blocks`` of a CPU tier and ``described``: whether
its events describe themselves) and ``retention`` (tokens between kept blocks of windows, 0: the last window's alone)
replaces the engine, whose groups, sizes of blocks and lookahead (tokens after a block that its hash covers) are the
answer. All others are requests: ``ids``, ``images`` as (identifier, offset, length), ``salt``, ``lora`` (an adapter),
``output`` (tokens to generate) and ``steps`` (it is aborted after as many, 0 for never). Answers have the tokens that
the engine had (``cached``, -1 where it was aborted before), those of them in its own cache (``own``), the number in its
answer to the client (``reported``, -1 where it was aborted before), the tokens that it generated, and the event batches
as its publisher encodes them.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ["VLLM_TARGET_DEVICE"] = "cpu"  # 0.33 is a CUDA build, of which no compiled part is used

import msgspec
import torch
from frames import serve
from vllm import envs
from vllm.config import KVEventsConfig, KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1 import kv_cache_interface as specs
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

MAX_LENGTH, CHUNK = 4_096, 1_024  # tokens of a prompt, and of one step
MEMORY = 1 << 40  # bytes; the number of blocks is given


DRAFT = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "vocab_size": 1_088,
}
"""Configuration of a drafter, which has no layer in the cache here."""


def speculation(method: str) -> dict[str, Any] | None:
    if not method:
        return None
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(DRAFT))
    return {"method": method, "model": str(folder), "num_speculative_tokens": 1}


def adapter(name: str | None) -> LoRARequest | None:
    return None if name is None else LoRARequest(name, ord(name[0]), f"/adapters/{name}")


def layer_spec(kind: str, block_size: int, fields: dict[str, Any]) -> Any:
    """What a layer of this kind keeps; every kind has pages of one size, as vLLM requires of groups in one pool."""
    if kind == "mamba":
        page = 2 * block_size * 64 * 2  # that of attention with one head of 64 in 16 bits
        return specs.MambaSpec(
            block_size=block_size, shapes=((page // 4,),), dtypes=(torch.float32,), mamba_cache_mode="align"
        )
    attention = {"block_size": block_size, "num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
    kinds = {
        "full": specs.FullAttentionSpec,
        "window": specs.SlidingWindowSpec,
        "mla": specs.MLAAttentionSpec,
        "chunked": specs.ChunkedLocalAttentionSpec,
    }
    return kinds[kind](**{**attention, **fields})


def cache_configs(config: Any, layers: dict[str, Any]) -> list[Any]:
    """Plan the cache of one worker as the engine does. 0.33 groups the layers before that."""
    if hasattr(kv_cache_utils, "get_kv_cache_configs"):
        return kv_cache_utils.get_kv_cache_configs(config, [layers], [MEMORY])
    from vllm.v1.core import kv_cache_planning

    groups = kv_cache_planning.get_global_kv_cache_groups(config, [layers])
    return kv_cache_planning.get_kv_cache_configs(config, [layers], [MEMORY], groups)


def offloading(offload: dict[str, Any]) -> KVTransferConfig | None:
    if not offload:
        return None
    extra = {"self_describing_kv_events": offload["described"], "cpu_bytes_to_use": 1}
    return KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra)


class Transfers:
    """The worker's side of the offloading connector. Nothing is copied; a job ends after one to three steps."""

    def __init__(self) -> None:
        self._step = 0
        self._ends: dict[int, int] = {}  # job -> the step after which it has ended
        self._loads: dict[int, str] = {}  # job -> the request that waits for it

    def run(self, metadata: Any) -> KVConnectorOutput | None:
        """Take the jobs of a step and return those that have ended with it."""
        if metadata is None:
            return None
        self._step += 1
        jobs = {**metadata.load_jobs, **metadata.store_jobs}
        self._ends |= {job: self._step + job % 3 for job in jobs}
        self._loads |= {job: load.req_id for job, load in metadata.load_jobs.items()}
        flushed = metadata.jobs_to_flush or set()
        ended = [job for job, step in self._ends.items() if step < self._step or job in flushed]
        for job in ended:
            del self._ends[job]
        loaded = {self._loads.pop(job) for job in ended if job in self._loads}
        done = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(ended, 1)) if ended else None
        return KVConnectorOutput(finished_recving=loaded, kv_connector_worker_meta=done)


class Engine:
    """vLLM's scheduler over layers of these kinds."""

    def __init__(
        self,
        folder: str,
        layers: list[list[Any]],
        block_size: int,
        blocks: int,
        drafter: str,
        offload: dict[str, Any],
        retention: int,
    ) -> None:
        arguments = EngineArgs(
            model=folder,
            block_size=block_size,
            max_model_len=MAX_LENGTH,
            max_num_batched_tokens=CHUNK,
            max_num_seqs=8,
            enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256_cbor",
            num_gpu_blocks_override=blocks,
            async_scheduling=False,
            speculative_config=speculation(drafter),
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
            kv_transfer_config=offloading(offload),
            prefix_cache_retention_interval=retention,
        )
        self.config = arguments.create_engine_config()
        # Of a worker's backend. Blocks of all layers lie together, or with heads of several numbers apart, as on a CPU,
        # which gives groups blocks of several sizes.
        apart = any("num_kv_heads" in fields for _, fields in layers)
        self.config.cache_config.kv_cache_layout = "LBHNC" if apart else "BLNHC"
        if any(kind == "mamba" for kind, _ in layers):
            self.config.cache_config.mamba_cache_mode = "align"
            self.config.cache_config.mamba_block_size = block_size
        layer_specs = {str(n): layer_spec(kind, block_size, fields) for n, (kind, fields) in enumerate(layers)}
        with set_current_vllm_config(self.config):
            (made,) = cache_configs(self.config, layer_specs)
            cache = kv_cache_utils.generate_scheduler_kv_cache_config([made])
            self.config.cache_config.num_gpu_blocks = cache.num_blocks
            if offload:
                size = cache.kv_cache_tensors[0].size // cache.num_blocks
                self.config.kv_transfer_config.kv_connector_extra_config["cpu_bytes_to_use"] = offload["blocks"] * size
            unit, hash_unit = kv_cache_utils.resolve_kv_cache_block_sizes(cache, self.config)
            self.scheduler = Scheduler(
                vllm_config=self.config,
                kv_cache_config=cache,
                structured_output_manager=StructuredOutputManager(self.config),
                block_size=unit,
                hash_block_size=hash_unit,
                log_stats=True,
            )
        # No image is encoded here, so images of any size are allowed.
        self.scheduler.max_num_encoder_input_tokens = MAX_LENGTH
        self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=MAX_LENGTH)
        hash_function = get_hash_fn_by_name("sha256_cbor")
        kv_cache_utils.init_none_hash(hash_function)
        # 0.33 hashes the next tokens, too, beside some drafters.
        self.lookahead = getattr(self.config, "num_hash_lookahead_tokens", 0)
        ahead = [self.lookahead] if self.lookahead else []
        self._hasher = kv_cache_utils.get_request_block_hasher(hash_unit, hash_function, *ahead)
        self._encode = msgspec.msgpack.Encoder().encode
        self._batches: list[bytes] = []
        self._transfers = Transfers()
        self.scheduler.kv_event_publisher.publish = lambda batch: self._batches.append(self._encode(batch))
        self._count = 0
        envs.enable_envs_cache()  # as an engine does once it has started: a tenth of a request's time

    def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Run a request to its end, or abort it after some steps."""
        self._count += 1
        name = f"r{self._count}"
        request = Request(
            request_id=name,
            prompt_token_ids=asked["ids"],
            sampling_params=SamplingParams(max_tokens=asked["output"], temperature=0, ignore_eos=True),
            pooling_params=None,
            cache_salt=asked["salt"],
            lora_request=adapter(asked["lora"]),
            mm_features=[
                MultiModalFeatureSpec(
                    data=None,
                    modality="image",
                    identifier=identifier,
                    mm_hash=identifier,
                    mm_position=PlaceholderRange(offset=offset, length=length),
                )
                for identifier, offset, length in asked["images"]
            ],
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        self._batches = []
        cached, steps, own, reported = -1, 0, 0, -1
        while self.scheduler.has_unfinished_requests():
            scheduled = self.scheduler.schedule()
            for new in scheduled.scheduled_new_reqs:
                cached = new.num_computed_tokens if cached < 0 else cached
            for answers in self.scheduler.update_from_output(scheduled, self._forward(scheduled, request)).values():
                for stats in [answer.prefill_stats for answer in answers.outputs if answer.prefill_stats]:
                    own, reported = stats.num_local_cached_tokens, stats.num_cached_tokens
            steps += 1
            if steps == asked["steps"]:
                self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        while True:
            self.scheduler.update_from_output(empty := self.scheduler.schedule(), self._forward(empty, request))
            if self.scheduler.connector is None or not self.scheduler.connector.has_pending_push_work():
                break
        answer = {"cached": cached, "own": own, "reported": reported}
        return {**answer, "output": list(request.output_token_ids), "batches": self._batches}

    def _forward(self, scheduled: Any, request: Request) -> ModelRunnerOutput:
        names = list(scheduled.num_scheduled_tokens)
        done = request.num_computed_tokens >= request.num_tokens
        tokens = [[1000 + request.num_tokens * 7 % 997] if done else [] for _ in names]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: n for n, name in enumerate(names)},
            sampled_token_ids=tokens,
            kv_connector_output=self._transfers.run(scheduled.kv_connector_metadata),
        )


def main() -> None:
    engine: Engine | None = None

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        nonlocal engine
        if "layers" in message:
            engine = Engine(sys.argv[1], **message)
            groups = [group.kv_cache_spec for group in engine.scheduler.kv_cache_config.kv_cache_groups]
            sizes = sorted({spec.block_size for spec in groups})
            return {"groups": [type(spec).__name__ for spec in groups], "sizes": sizes, "lookahead": engine.lookahead}
        assert engine is not None, "a request before any layers"
        return engine.run(message)

    serve(answer)


if __name__ == "__main__":
    main()
