"""Command line of the simulated ``sglang serve``.

It accepts every flag that mmrouter renders and the common ones; an unknown one is an error. ``/server_info`` returns
the arguments that media identity depends on.
"""

import argparse
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

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
from mmrouter_sim.sglang.pages import VERSION
from mmrouter_sim.sglang.pairing import side

DRAIN_SECONDS = 30 * 86_400.0
"""The engine waits for its last request without a limit (docs/engine-facts/sglang.md#http-endpoints)."""

_NO_EFFECT = """
    --model-type --device --dtype --load-format --quantization --kv-cache-dtype --mem-fraction-static
    --attention-backend --sampling-backend --grammar-backend --mm-attention-backend --schedule-policy --random-seed
    --log-level --reasoning-parser --download-dir --watchdog-timeout --decode-log-interval
    --disaggregation-ib-device --load-balance-method --max-lora-rank --max-loras-per-batch --lora-backend
    --lora-eviction-policy
"""
_NO_EFFECT_SWITCHES = """
    --trust-remote-code --enable-metrics --disable-cuda-graph --disable-overlap-schedule --skip-server-warmup
    --enable-multimodal --enable-prefix-mm-cache --sleep-on-idle
"""

_BACKENDS = ("mooncake", "nixl", "ascend", "mori", "mooncake_tcp")  # not the fake one, which needs no peer


class _Events(EventsConfig, frozen=True, forbid_unknown_fields=True):
    """``--kv-events-config``, with the engine's defaults (docs/engine-facts/sglang.md#kv-event-flags)."""

    enable_kv_cache_events: bool = True  # the publisher decides
    publisher: Literal["null", "zmq"] | None = "null"
    bind: bool | None = None
    format: Literal["default"] = "default"  # the other one is not simulated

    @property
    def binds(self) -> bool:
        host = self.endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        local = self.endpoint.startswith(("ipc://", "inproc://"))
        return self.bind if self.bind is not None else local or host in ("*", "::", "0.0.0.0")  # noqa: S104


def parse(argv: Sequence[str]) -> Settings:
    """Return the settings of ``sglang serve [flags]``. Exits with status 2 on a usage error, 0 after ``--help``."""
    parser = Parser(prog="sglang", description="Simulated SGLang: the real flags and wire, no GPU.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    commands.add_parser("version", help="show the version")
    serve = commands.add_parser("serve", help="serve a model over HTTP", allow_abbrev=False)
    _add_flags(serve)
    if list(argv) == ["version"]:
        parser.exit(0, f"sglang version: {VERSION}\n")
    return parse_with(parser, serve, argv, _settings)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model_tag", nargs="?", metavar="MODEL", help="folder with the model's metadata files")
    add("--model-path", "--model", dest="model_path")
    add("--revision")
    add("--served-model-name")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000)
    add("--api-key")
    add("--page-size", dest="block_size", type=int, default=1)
    add("--max-total-tokens", type=int)
    add("--context-length", dest="max_model_len", type=int)
    add("--max-running-requests", dest="max_seqs", type=int, default=256)
    add("--chunked-prefill-size", dest="max_batched_tokens", type=int, default=8192)
    add("--tensor-parallel-size", "--tp-size", "--tp", dest="tp_size", type=int, default=1)
    add("--data-parallel-size", "--dp-size", "--dp", dest="ranks", type=int, default=1)
    add("--disable-radix-cache", action="store_true")
    add("--enable-response-store", action="store_true")
    add("--kv-events-config", default="{}", metavar="JSON")
    add("--enable-cache-report", dest="token_details", action="store_true")
    add("--chat-template", metavar="FILE")
    add("--enable-lora", action=argparse.BooleanOptionalAction)
    add("--lora-paths", nargs="*", default=[], metavar="[NAME=]PATH")
    add("--lora-target-modules", nargs="*", help="no effect here")
    add("--tool-call-parser")
    add("--mm-process-config", default="{}", metavar="JSON")
    add("--mm-preprocess-cache-size-mb", dest="preprocess_cache_mb", type=int, default=0)
    add("--limit-mm-data-per-request", default="{}", metavar="JSON")
    add("--encoder-only", dest="encodes_only", action="store_true")
    add("--language-only", action="store_true")
    add("--encoder-urls", dest="urls", nargs="+", default=[])
    # With another backend a failing encoder ends the engine.
    add("--encoder-transfer-backend", choices=("zmq_to_tokenizer",), default="zmq_to_tokenizer", help="no effect here")
    add("--disaggregation-mode", choices=("null", "prefill", "decode"), default="null")
    add("--disaggregation-transfer-backend", choices=_BACKENDS, default="mooncake", help="no effect here")
    add("--disaggregation-bootstrap-port", type=int, default=8998)
    add_no_effect(parser, _NO_EFFECT, _NO_EFFECT_SWITCHES, "store_true")
    add_tls_flags(parser)
    add_sim_flags(parser)


def _settings(args: argparse.Namespace) -> Settings:
    model = args.model_tag or args.model_path
    if not model:
        raise ValueError("which model? sglang serve --model-path MODEL")
    if args.encodes_only and (args.language_only or args.disaggregation_mode != "null"):
        raise ValueError("Cannot set --encoder-only and --language-only or a disaggregation mode together")
    if args.language_only and not args.urls:
        raise ValueError("--language-only without --encoder-urls is not simulated")
    events = msgspec.json.decode(args.kv_events_config, type=_Events)
    process = msgspec.json.decode(args.mm_process_config, type=dict[str, dict[str, Any]])
    limits = msgspec.json.decode(args.limit_mm_data_per_request, type=dict[str, int])
    given = () if args.enable_lora is False else args.lora_paths
    loaded = [text if "=" in text or text.startswith("{") else f"{text}={text}" for text in given]
    blocks = args.max_total_tokens // args.block_size + 1 if args.max_total_tokens else args.sim_blocks
    mode, name = args.disaggregation_mode, args.served_model_name or model
    return Settings(
        **common_settings(args, events),
        model=model,
        served_names=(name,),
        api_keys=(args.api_key,) if args.api_key else (),
        blocks=blocks,
        prefix_caching=mode != "decode" and not args.disable_radix_cache,
        processor=process.get("image", {}),
        image_limit=limits.get("image"),
        shutdown_seconds=DRAIN_SECONDS,
        engine="sglang",
        stores_responses=args.enable_response_store and mode == "null",
        pairs=side(mode, args.host, args.disaggregation_bootstrap_port),
        adapters=adapters("--lora-paths", loaded, [name], "lora_name", "lora_path"),
        calls_tools=args.tool_call_parser is not None,
        encoder_urls=tuple(args.urls) if args.language_only else (),
        arguments={
            "model_path": model,
            "served_model_name": name,
            "revision": args.revision,
            "device": args.device,
            "dtype": args.dtype or "auto",
            "page_size": args.block_size,
            "tp_size": args.tp_size,
            "dp_size": args.ranks,
            "disable_radix_cache": args.disable_radix_cache,
            "enable_cache_report": args.token_details,
            "chat_template": args.chat_template,
            "kv_events_config": args.kv_events_config,
            "mm_process_config": process or None,
            "mm_preprocess_cache_size_mb": args.preprocess_cache_mb,
            "mm_feature_transport": "cpu",
            "image_processor_backend": "auto",
            "disable_fast_image_processor": False,
            "trust_mm_content_hashes": False,
            "speculative_algorithm": None,
            "disaggregation_mode": mode,
            "language_only": args.language_only,
        },
    )
