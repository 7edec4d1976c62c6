"""Command line of the simulated ``vllm serve``.

It accepts every flag that mmrouter renders and the common ones that users add; an unknown one is an error, as in the
engine. Flags about memory, numerics and compilation have no effect.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from mmrouter_sim.core.requests import ALGORITHMS
from mmrouter_sim.rank_runner import EventsConfig
from mmrouter_sim.settings import (
    Parser,
    Settings,
    adapters,
    add_no_effect,
    add_sim_flags,
    add_tls_flags,
    common_settings,
    parse_with,
)
from mmrouter_sim.vllm.transfers import connector_config

VERSION = "0.32.0"
"""The release whose behaviour is simulated."""

_NO_EFFECT = """
    --load-format --dtype --gpu-memory-utilization --kv-cache-dtype --quantization --tensor-parallel-size
    --pipeline-parallel-size --max-num-queued-reqs --mm-processor-cache-type --mm-encoder-tp-mode --generation-config
    --revision --tokenizer-mode --compilation-config --uvicorn-log-level --seed --swap-space --cpu-offload-gb
    --attention-backend --distributed-executor-backend --scheduling-policy --max-lora-rank --max-loras --max-cpu-loras
    --lora-dtype --reasoning-parser --structured-outputs-config
"""
_NO_EFFECT_SWITCHES = """
    --enforce-eager --trust-remote-code --disable-log-requests --enable-log-requests --disable-log-stats
    --disable-uvicorn-access-log --enable-chunked-prefill --async-scheduling --skip-mm-profiling
    --disable-sliding-window --enable-server-load-tracking --disable-hybrid-kv-cache-manager
    --mm-encoder-only --fully-sharded-loras
"""


def parse(argv: Sequence[str]) -> Settings:
    """Return the settings of ``vllm serve`` or ``vllm launch render`` with ``MODEL [flags]``. Exits with status 2 on a
    usage error, 0 after ``--help``.
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
    return parse_with(parser, serve, argv, _settings)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model_tag", nargs="?", metavar="MODEL", help="folder with the model's metadata files")
    add("--model", dest="model_flag")
    add("--served-model-name", nargs="+", default=[])
    add("--host", default="0.0.0.0")  # noqa: S104 - the engine's default
    add("--port", type=int, default=8000)
    add("--api-key", nargs="+", default=[])
    add("--block-size", type=int, default=16)
    add("--num-gpu-blocks-override", type=int)
    add("--kv-cache-memory-bytes", type=int)
    add("--max-model-len", type=int)
    add("--max-num-seqs", dest="max_seqs", type=int, default=256)
    add("--max-num-batched-tokens", dest="max_batched_tokens", type=int, default=2048)
    add("--data-parallel-size", "-dp", dest="ranks", type=int, default=1)
    switch = argparse.BooleanOptionalAction
    add("--enable-prefix-caching", dest="prefix_caching", action=switch, default=True)
    add("--prefix-caching-hash-algo", dest="hash_algorithm", choices=sorted(ALGORITHMS), default="sha256")
    add("--kv-events-config", default="{}", metavar="JSON")
    add("--kv-transfer-config", default="", metavar="JSON")
    add("--ec-transfer-config", default="", metavar="JSON")
    add("--enable-prompt-tokens-details", dest="token_details", action=switch, default=False)
    add("--enable-scale-out", dest="scale_out", action=switch, default=False)
    add("--chat-template", metavar="FILE|TEMPLATE")
    add("--enable-auto-tool-choice", action=switch, default=False)
    add("--tool-call-parser")
    add("--enable-lora", action=switch, default=False)
    add("--lora-modules", nargs="+", default=[], metavar="NAME=PATH")
    add("--mm-processor-kwargs", default="{}", metavar="JSON")
    add("--limit-mm-per-prompt", default="{}", metavar="JSON")
    add("--mm-processor-cache-gb", type=float, default=4.0)
    add("--allowed-local-media-path", default="")
    add("--shutdown-timeout", dest="shutdown_seconds", type=float, default=0.0, metavar="SECONDS")
    add("-tp", dest="tensor_parallel_size")
    add_no_effect(parser, _NO_EFFECT, _NO_EFFECT_SWITCHES, switch)
    add_tls_flags(parser)
    add_sim_flags(parser)
    device = os.environ.get("MMROUTER_SIM_DEVICE", "")
    add("--sim-device", default=device, help="device that it computes on, cpu for instance (MMROUTER_SIM_DEVICE)")


def _cache_bytes(args: argparse.Namespace) -> int | None:
    """Return the configured size of the KV cache. See docs/engine-facts/vllm.md#devices."""
    space = os.environ.get("VLLM_CPU_KVCACHE_SPACE") if args.sim_device == "cpu" else ""
    size: int | None = args.kv_cache_memory_bytes
    return int(space) << 30 if space else size


def _settings(args: argparse.Namespace) -> Settings:
    model = args.model_tag or args.model_flag
    if not model:
        raise ValueError("which model? vllm serve MODEL")
    if args.lora_modules and not args.enable_lora:
        raise ValueError("--lora-modules needs --enable-lora: LoRA is not enabled")
    if args.enable_auto_tool_choice and not args.tool_call_parser:
        raise ValueError("--enable-auto-tool-choice requires --tool-call-parser")
    names = tuple(args.served_model_name) or (model,)
    limits = msgspec.json.decode(args.limit_mm_per_prompt, type=dict[str, int | dict[str, int]])
    images = limits.get("image")
    return Settings(
        **common_settings(args, msgspec.json.decode(args.kv_events_config, type=EventsConfig)),
        model=model,
        served_names=names,
        adapters=adapters("--lora-modules", args.lora_modules, names, "name", "path"),
        calls_tools=args.enable_auto_tool_choice,
        api_keys=tuple(key for key in args.api_key or [os.environ.get("VLLM_API_KEY", "")] if key),
        blocks=args.num_gpu_blocks_override or args.sim_blocks,
        cache_bytes=_cache_bytes(args),
        processor=msgspec.json.decode(args.mm_processor_kwargs, type=dict[str, Any]),
        image_limit=images.get("count") if isinstance(images, dict) else images,
        media_root=Path(args.allowed_local_media_path).resolve() if args.allowed_local_media_path else None,
        processor_cache_bytes=int(args.mm_processor_cache_gb * (1 << 30)),
        int_hashes=os.environ.get("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1") != "0",
        handover=connector_config(args.kv_transfer_config, args.ec_transfer_config),
        stores_responses=os.environ.get("VLLM_ENABLE_RESPONSES_API_STORE", "0") != "0",
        renders=args.command == "launch",
    )
