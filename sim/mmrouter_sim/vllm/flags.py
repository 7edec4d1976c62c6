"""The command line of ``vllm serve``, as far as it means anything without a GPU.

Every flag that mmrouter renders and the common ones a user adds are known; an unknown one is an error, as in the
engine. Flags about memory, numerics and compilation are taken and have no effect. The simulator's own knobs begin
with ``--sim-``; each has an environment variable (``--sim-speed``: ``MMROUTER_SIM_SPEED``) for use where only the
environment is free.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from mmrouter_sim.core.hashing import ALGORITHMS
from mmrouter_sim.core.step_cost import Cost
from mmrouter_sim.publisher import EventsConfig
from mmrouter_sim.sglang.pairing import Side
from mmrouter_sim.vllm.connectors import Configured, configured

VERSION = "0.32.0"
"""The release whose behaviour is simulated."""

_NO_EFFECT = (
    "--load-format",
    "--dtype",
    "--gpu-memory-utilization",
    "--kv-cache-dtype",
    "--quantization",
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--max-num-queued-reqs",
    "--mm-processor-cache-type",
    "--mm-encoder-tp-mode",
    "--generation-config",
    "--revision",
    "--tokenizer-mode",
    "--compilation-config",
    "--uvicorn-log-level",
    "--seed",
    "--swap-space",
    "--cpu-offload-gb",
    "--attention-backend",
    "--distributed-executor-backend",
    "--scheduling-policy",
)
_NO_EFFECT_SWITCHES = (
    "--enforce-eager",
    "--trust-remote-code",
    "--disable-log-requests",
    "--enable-log-requests",
    "--disable-log-stats",
    "--disable-uvicorn-access-log",
    "--enable-chunked-prefill",
    "--async-scheduling",
    "--enable-auto-tool-choice",
    "--skip-mm-profiling",
    "--disable-sliding-window",
    "--enable-server-load-tracking",
    "--disable-hybrid-kv-cache-manager",
    "--mm-encoder-only",
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What one simulated vLLM was started with."""

    model: str
    revision: str | None
    served_names: tuple[str, ...]
    host: str
    port: int
    api_keys: tuple[str, ...]
    block_size: int
    blocks: int | None  # the reserved one included; None: enough for the model's context and some requests
    max_model_len: int | None
    max_seqs: int
    max_batched_tokens: int
    ranks: int
    prefix_caching: bool
    hash_algorithm: str
    events: EventsConfig
    token_details: bool
    chat_template: str | None  # the template itself
    processor: dict[str, Any]
    image_limit: int | None
    media_root: Path | None
    processor_cache_bytes: int
    shutdown_seconds: float
    dev_mode: bool
    int_hashes: bool
    cost: Cost
    seed: int
    answer_tokens: int
    handover: Configured = field(default_factory=Configured)
    renders: bool = False  # only preprocess: ``vllm launch render``
    pairs: Side | None = None  # serves its half of requests only (SGLang)
    engine: Literal["vllm", "sglang"] = "vllm"
    bind: bool | None = None  # of the event socket; None: as its address says
    preprocess_cache_mb: int = 0
    encodes_only: bool = False  # an encoder of SGLang
    encoder_urls: tuple[str, ...] = ()  # who encodes for an engine of SGLang
    arguments: dict[str, Any] = field(default_factory=dict)  # as the engine resolves them, where it tells them


class Parser(argparse.ArgumentParser):
    """Ends the process on a usage error, saying which engine speaks."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog.split()[0]} (simulated): error: {message}\n")


def parse(argv: Sequence[str]) -> Settings:
    """Return the settings of ``vllm serve`` or ``vllm launch render`` with ``MODEL [flags]``.

    Exits with status 2 on a usage error, 0 after ``--help``.
    """
    parser = Parser(prog="vllm", description="Simulated vLLM: the real flags and wire, no GPU.", allow_abbrev=False)
    parser.add_argument("-v", "--version", action="version", version=VERSION)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    serve = commands.add_parser("serve", help="serve a model over HTTP", allow_abbrev=False)
    _add_flags(serve)
    components = commands.add_parser("launch", help="start a part of an engine", allow_abbrev=False).add_subparsers(
        dest="component", required=True, parser_class=Parser
    )
    _add_flags(components.add_parser("render", help="preprocess over HTTP, run no model", allow_abbrev=False))
    args = parser.parse_args([dashed(arg) for arg in argv])
    try:
        return _settings(args)
    except (ValueError, OSError) as error:  # msgspec's errors are ValueErrors
        serve.error(str(error))


def dashed(arg: str) -> str:
    """The engine takes ``--block_size`` for ``--block-size``; values stay as they are."""
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model_tag", nargs="?", metavar="MODEL", help="folder with the model's metadata files")
    add("--model")
    add("--served-model-name", nargs="+", default=[])
    add("--host", default="0.0.0.0")  # noqa: S104 - the engine's default
    add("--port", type=int, default=8000)
    add("--api-key", nargs="+", default=[])
    add("--block-size", type=int, default=16)
    add("--num-gpu-blocks-override", type=int)
    add("--max-model-len", type=int)
    add("--max-num-seqs", type=int, default=256)
    add("--max-num-batched-tokens", type=int, default=2048)
    add("--data-parallel-size", "-dp", type=int, default=1)
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    add("--prefix-caching-hash-algo", choices=sorted(ALGORITHMS), default="sha256")
    add("--kv-events-config", default="{}", metavar="JSON")
    add("--kv-transfer-config", default="", metavar="JSON")
    add("--ec-transfer-config", default="", metavar="JSON")
    add("--enable-prompt-tokens-details", action=argparse.BooleanOptionalAction, default=False)
    add("--chat-template", metavar="FILE|TEMPLATE")
    add("--mm-processor-kwargs", default="{}", metavar="JSON")
    add("--limit-mm-per-prompt", default="{}", metavar="JSON")
    add("--mm-processor-cache-gb", type=float, default=4.0)
    add("--allowed-local-media-path", default="")
    add("--shutdown-timeout", type=float, default=0.0, metavar="SECONDS")
    add("-tp", dest="tensor_parallel_size")
    for name in _NO_EFFECT:
        add(name, help="no effect here")
    for name in _NO_EFFECT_SWITCHES:
        add(name, action=argparse.BooleanOptionalAction, help="no effect here")
    add_sim_flags(parser)


def add_sim_flags(parser: argparse.ArgumentParser) -> None:
    """Add the simulator's own knobs."""
    sim = parser.add_argument_group("simulator")
    defaults = Cost()
    for name, kind, default, text in (
        ("--sim-speed", float, defaults.speed, "divides every simulated time"),
        ("--sim-prefill-rate", float, defaults.prefill_rate, "prompt tokens per second"),
        ("--sim-encode-seconds", float, defaults.encode_seconds, "encoder seconds per visual token"),
        ("--sim-decode-ms", float, defaults.decode_seconds * 1e3, "milliseconds per decoding step"),
        ("--sim-kv-seconds", float, defaults.kv, "seconds per token whose KV blocks another engine hands over"),
        ("--sim-process-seconds", float, defaults.process, "seconds per visual token that is processed"),
        ("--sim-embedding-seconds", float, defaults.embedding, "seconds per visual token handed over"),
        ("--sim-jitter", float, defaults.jitter, "half-width of the random factor on each step's time"),
        ("--sim-seed", int, 0, "of times and answers"),
        ("--sim-blocks", int, None, "blocks of the KV cache, the reserved one included"),
        ("--sim-replay-steps", int, None, "batches that can be replayed, instead of the event configuration's"),
        ("--sim-answer-tokens", int, 24, "mean length of an answer that is not cut off"),
    ):
        variable = name[2:].upper().replace("-", "_").replace("SIM_", "MMROUTER_SIM_", 1)
        sim.add_argument(name, type=kind, default=os.environ.get(variable, default), help=f"{text} ({variable})")


def _settings(args: argparse.Namespace) -> Settings:
    model = args.model_tag or args.model
    if not model:
        raise ValueError("which model? vllm serve MODEL")
    if args.data_parallel_size < 1:
        raise ValueError("--data-parallel-size must be at least 1")
    limits = msgspec.json.decode(args.limit_mm_per_prompt, type=dict[str, int | dict[str, int]])
    images = limits.get("image")
    return Settings(
        model=model,
        revision=args.revision,
        served_names=tuple(args.served_model_name) or (model,),
        host=args.host,
        port=args.port,
        api_keys=tuple(key for key in args.api_key or [os.environ.get("VLLM_API_KEY", "")] if key),
        block_size=args.block_size,
        blocks=args.num_gpu_blocks_override or args.sim_blocks,
        max_model_len=args.max_model_len,
        max_seqs=args.max_num_seqs,
        max_batched_tokens=args.max_num_batched_tokens,
        ranks=args.data_parallel_size,
        prefix_caching=args.enable_prefix_caching,
        hash_algorithm=args.prefix_caching_hash_algo,
        events=replayed(msgspec.json.decode(args.kv_events_config, type=EventsConfig), args),
        token_details=args.enable_prompt_tokens_details,
        chat_template=template(args.chat_template),
        processor=msgspec.json.decode(args.mm_processor_kwargs, type=dict[str, Any]),
        image_limit=images.get("count") if isinstance(images, dict) else images,
        media_root=Path(args.allowed_local_media_path).resolve() if args.allowed_local_media_path else None,
        processor_cache_bytes=int(args.mm_processor_cache_gb * (1 << 30)),
        shutdown_seconds=args.shutdown_timeout,
        dev_mode=os.environ.get("VLLM_SERVER_DEV_MODE", "0") == "1",
        int_hashes=os.environ.get("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1") != "0",
        cost=cost_of(args),
        seed=args.sim_seed,
        answer_tokens=args.sim_answer_tokens,
        handover=configured(args.kv_transfer_config, args.ec_transfer_config),
        renders=args.command == "launch",
    )


def replayed(config: EventsConfig, args: argparse.Namespace) -> EventsConfig:
    """Return the event configuration with what the simulator's knobs say about it."""
    steps = args.sim_replay_steps
    return config if steps is None else msgspec.structs.replace(config, buffer_steps=steps)


def cost_of(args: argparse.Namespace) -> Cost:
    """Return what the simulator's knobs say about time."""
    return Cost(
        prefill_rate=args.sim_prefill_rate,
        encode_seconds=args.sim_encode_seconds,
        decode_seconds=args.sim_decode_ms / 1e3,
        kv=args.sim_kv_seconds,
        process=args.sim_process_seconds,
        embedding=args.sim_embedding_seconds,
        jitter=args.sim_jitter,
        speed=args.sim_speed,
    )


def template(value: str | None) -> str | None:
    """A template is given by file name or, when it holds template syntax, as itself."""
    if value is None or "{" in value:
        return value
    return Path(value).read_text(encoding="utf-8")
