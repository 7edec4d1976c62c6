"""Settings of a simulated engine, and the command-line helpers that both engines share.

The simulator's own flags begin with ``--sim-``; each has an environment variable (``--sim-speed``:
``MMROUTER_SIM_SPEED``) for use where only the environment can be set.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from mmrouter_sim.core.requests import Adapter
from mmrouter_sim.core.step_cost import Cost
from mmrouter_sim.rank_runner import EventsConfig
from mmrouter_sim.sglang.pairing import PairSide
from mmrouter_sim.vllm.transfers import ConnectorConfig


@dataclass(frozen=True, slots=True)
class Settings:
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
    events: EventsConfig
    token_details: bool
    chat_template: str | None  # content of the template
    processor: dict[str, Any]
    image_limit: int | None
    shutdown_seconds: float
    cost: Cost
    seed: int
    answer_tokens: int
    hash_algorithm: str = ""
    int_hashes: bool = True
    media_root: Path | None = None
    processor_cache_bytes: int = 1 << 32
    handover: ConnectorConfig = field(default_factory=ConnectorConfig)
    cache_bytes: int | None = None  # configured size of the KV cache
    scale_out: bool = False  # whether the endpoints for token ids are open
    stores_responses: bool = False  # of /v1/responses
    renders: bool = False  # only preprocess: ``vllm launch render``
    pairs: PairSide | None = None  # one side of a prefill/decode pair (SGLang)
    engine: Literal["vllm", "sglang"] = "vllm"
    preprocess_cache_mb: int = 0
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    enable_ssl_refresh: bool = False
    encodes_only: bool = False  # an encoder of SGLang
    encoder_urls: tuple[str, ...] = ()  # encoders of an SGLang engine
    adapters: tuple[Adapter, ...] = ()
    calls_tools: bool = False  # also where a request leaves the choice to the model
    arguments: dict[str, Any] = field(default_factory=dict)  # as SGLang's /server_info returns them


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog.split()[0]} (simulated): error: {message}\n")


def add_sim_flags(parser: argparse.ArgumentParser) -> None:
    sim = parser.add_argument_group("simulator")
    defaults = Cost()
    for name, kind, default, text in (
        ("--sim-speed", float, defaults.speed, "divides every simulated time"),
        ("--sim-prefill-rate", float, defaults.prefill_rate, "prompt tokens per second"),
        ("--sim-encode-seconds", float, defaults.encode_seconds, "encoder seconds per visual token"),
        ("--sim-decode-ms", float, defaults.decode_seconds * 1e3, "milliseconds per decoding step"),
        ("--sim-kv-seconds", float, defaults.kv_seconds, "seconds per token whose KV blocks are received"),
        ("--sim-process-seconds", float, defaults.process_seconds, "seconds per visual token that is processed"),
        ("--sim-embedding-seconds", float, defaults.embedding_seconds, "seconds per visual token handed over"),
        ("--sim-jitter", float, defaults.jitter, "half-width of the random factor on each step's time"),
        ("--sim-seed", int, 0, "of times and answers"),
        ("--sim-blocks", int, None, "blocks of the KV cache, the reserved one included"),
        ("--sim-replay-steps", int, None, "batches that can be replayed, instead of the event configuration's"),
        ("--sim-answer-tokens", int, 24, "mean length of an answer that is not cut off"),
    ):
        variable = name[2:].upper().replace("-", "_").replace("SIM_", "MMROUTER_SIM_", 1)
        sim.add_argument(name, type=kind, default=os.environ.get(variable, default), help=f"{text} ({variable})")


def add_tls_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ssl-keyfile")
    parser.add_argument("--ssl-certfile")
    parser.add_argument("--enable-ssl-refresh", action="store_true")


def adapters(flag: str, given: Sequence[str], served: Sequence[str], name: str, path: str) -> tuple[Adapter, ...]:
    """Return the LoRA adapters of a flag's values: ``NAME=PATH``, or a JSON object with the keys ``name`` and ``path``.

    The simulator reads no weights, so that no file has to exist. Raises ``ValueError``.
    """
    pairs: dict[str, str] = {}
    for text in given:
        if text.startswith("{"):
            fields = msgspec.json.decode(text, type=dict[str, Any])
            found, where = fields.get(name), fields.get(path)
        else:
            found, _, where = text.partition("=")
        if not (isinstance(found, str) and found and isinstance(where, str) and where):
            raise ValueError(f"{flag} {text}: NAME=PATH is expected, or JSON with {name!r} and {path!r}")
        if found in pairs or found in served:
            raise ValueError(f"{flag}: the adapter {found!r} conflicts with another or with the model")
        pairs[found] = where
    return tuple(Adapter(*pair, number) for number, pair in enumerate(pairs.items(), 1))


def add_no_effect(parser: argparse.ArgumentParser, flags: str, switches: str, action: Any) -> None:
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
    # The engines accept --block_size for --block-size; values are unchanged.
    split = ((arg, *arg.partition("=")) for arg in argv)
    args = parser.parse_args([n.replace("_", "-") + sep + value if a[:2] == "--" else a for a, n, sep, value in split])
    try:
        return make(args)
    except (ValueError, OSError) as error:  # msgspec's errors are ValueErrors
        serve.error(str(error))


def common_settings(args: argparse.Namespace, events: EventsConfig) -> dict[str, Any]:
    """Return the settings that flags have the names of, and those of the simulator's own flags."""
    if args.ranks < 1:
        raise ValueError("--data-parallel-size must be at least 1")
    template, steps = args.chat_template, args.sim_replay_steps
    args.sim_decode_seconds = args.sim_decode_ms / 1e3
    if template is not None and "{" not in template:
        template = Path(template).read_text(encoding="utf-8")
    names = {field.name for field in fields(Settings)}
    return {name: value for name, value in vars(args).items() if name in names} | {
        "chat_template": template,
        "events": events if steps is None else msgspec.structs.replace(events, buffer_steps=steps),
        "cost": Cost(**{each.name: getattr(args, f"sim_{each.name}") for each in fields(Cost)}),
        "seed": args.sim_seed,
        "answer_tokens": args.sim_answer_tokens,
    }
