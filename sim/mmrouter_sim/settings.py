"""Settings of a simulated engine, and the command-line helpers that both engines share.

The simulator's own flags begin with ``--sim-``; each has an environment variable (``--sim-speed``:
``MMROUTER_SIM_SPEED``) for use where only the environment can be set.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from mmrouter_sim.core.step_cost import Cost
from mmrouter_sim.publisher import EventsConfig
from mmrouter_sim.sglang.pairing import PairSide
from mmrouter_sim.vllm.connectors import ConnectorConfig


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one simulated engine, from its command line and environment."""

    model: str
    revision: str | None
    served_names: tuple[str, ...]
    host: str
    port: int
    api_keys: tuple[str, ...]
    block_size: int
    blocks: int | None  # with the reserved one; None: enough for the model's context and some requests
    max_model_len: int | None
    max_seqs: int
    max_batched_tokens: int
    ranks: int
    prefix_caching: bool
    hash_algorithm: str
    events: EventsConfig
    token_details: bool
    chat_template: str | None  # content of the template
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
    handover: ConnectorConfig = field(default_factory=ConnectorConfig)
    renders: bool = False  # only preprocess: ``vllm launch render``
    pairs: PairSide | None = None  # one side of a prefill/decode pair (SGLang)
    engine: Literal["vllm", "sglang"] = "vllm"
    bind: bool | None = None  # whether the event socket binds; None: by its address
    preprocess_cache_mb: int = 0
    encodes_only: bool = False  # an encoder of SGLang
    encoder_urls: tuple[str, ...] = ()  # encoders of an SGLang engine
    arguments: dict[str, Any] = field(default_factory=dict)  # as SGLang's /server_info returns them


class Parser(argparse.ArgumentParser):
    """Exits on a usage error with a message that names the simulated engine."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog.split()[0]} (simulated): error: {message}\n")


def dashed(arg: str) -> str:
    """Return ``--block_size`` as ``--block-size``, as the engines accept both; values are unchanged."""
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value


def add_sim_flags(parser: argparse.ArgumentParser) -> None:
    """Add the simulator's own flags."""
    sim = parser.add_argument_group("simulator")
    defaults = Cost()
    for name, kind, default, text in (
        ("--sim-speed", float, defaults.speed, "divides every simulated time"),
        ("--sim-prefill-rate", float, defaults.prefill_rate, "prompt tokens per second"),
        ("--sim-encode-seconds", float, defaults.encode_seconds, "encoder seconds per visual token"),
        ("--sim-decode-ms", float, defaults.decode_seconds * 1e3, "milliseconds per decoding step"),
        ("--sim-kv-seconds", float, defaults.kv, "seconds per token whose KV blocks are received"),
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


def add_no_effect(parser: argparse.ArgumentParser, flags: str, switches: str, action: Any) -> None:
    """Add flags and switches, separated by white space, that have no effect in the simulator."""
    for name in flags.split():
        parser.add_argument(name, help="no effect here")
    for name in switches.split():
        parser.add_argument(name, action=action, help="no effect here")


def parse_with(
    parser: argparse.ArgumentParser,
    serve: argparse.ArgumentParser,
    argv: Sequence[str],
    make: Callable[[argparse.Namespace], Settings],
) -> Settings:
    """Parse a command line and make the settings. Exits with status 2 on a usage error, 0 after ``--help``."""
    args = parser.parse_args([dashed(arg) for arg in argv])
    try:
        return make(args)
    except (ValueError, OSError) as error:  # msgspec's errors are ValueErrors
        serve.error(str(error))


def common_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings whose flags are the same for all engines."""
    return {
        "revision": args.revision,
        "host": args.host,
        "port": args.port,
        "chat_template": template(args.chat_template),
        "cost": cost_of(args),
        "seed": args.sim_seed,
        "answer_tokens": args.sim_answer_tokens,
    }


def replayed(config: EventsConfig, args: argparse.Namespace) -> EventsConfig:
    """Return the event configuration, with the simulator's replay buffer if set."""
    steps = args.sim_replay_steps
    return config if steps is None else msgspec.structs.replace(config, buffer_steps=steps)


def cost_of(args: argparse.Namespace) -> Cost:
    """Return the cost model of the simulator's flags."""
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
    """Return the template in a file, or the value itself if it contains template syntax."""
    if value is None or "{" in value:
        return value
    return Path(value).read_text(encoding="utf-8")
