"""The command `mmrouter bench`: options, one or two runs, tables and files."""

import asyncio
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args
from urllib.parse import urlsplit

import msgspec
import typer
from rich.console import Console

from mmrouter_cli.options import FAILED, USAGE, CaCert, Control, Insecure, Token, leave, trust
from mmrouter_cli.status.control_api import with_scheme

if TYPE_CHECKING:
    from mmrouter_cli.bench.endpoint_probe import Target
    from mmrouter_cli.bench.types import Conversation, LoadSpec, Result

DEFAULT_CONCURRENCY = 8
MOST_REQUESTS = 100_000
LONGEST_TOKENS = 2**20
MOST_PIXELS = 8192
MOST_RUNS = 2
_ADDRESS = re.compile(r"(?:[\w.-]+|\[[0-9A-Fa-f:.]+\]):\d+(?:/|$)")
"""A URL without its scheme, rather than a file."""
WIDTH = 140
"""Columns of a table that is not printed to a terminal."""


def bench(
    url: Annotated[str, typer.Argument(help="An OpenAI-compatible endpoint, or the result file of an earlier run.")],
    against: Annotated[str | None, typer.Option(help="Compare with this: another endpoint, or a result file.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Play this file: a Mooncake trace, or statistics of an image service.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, max=MOST_REQUESTS, help="Requests in all.")] = 200,
    concurrency: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Conversations at a time. Default: 8, without --rate.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, max=10_000, help="Requests per second instead, at Poisson times.")
    ] = None,
    turns: Annotated[float, typer.Option(min=1, max=100, help="Mean turns of a conversation.")] = 3.0,
    think: Annotated[float, typer.Option(min=0, max=600, help="Mean seconds between an answer and a turn.")] = 0.0,
    system_prompts: Annotated[int, typer.Option(min=1, max=100_000, help="How many system prompts are shared.")] = 4,
    system_tokens: Annotated[int, typer.Option(min=0, max=LONGEST_TOKENS, help="Tokens of a system prompt.")] = 400,
    text_tokens: Annotated[int, typer.Option(min=1, max=LONGEST_TOKENS, help="Mean tokens of a user's turn.")] = 120,
    output_tokens: Annotated[int, typer.Option(min=1, max=LONGEST_TOKENS, help="Mean tokens of an answer.")] = 64,
    image_share: Annotated[float, typer.Option(min=0, max=1, help="Share of conversations with a picture.")] = 0.5,
    image_reuse: Annotated[float, typer.Option(min=0, max=1, help="Share of pictures shown repeatedly.")] = 0.5,
    image_size: Annotated[str, typer.Option(help="Pixels of a picture.")] = "448x448",
    longest: Annotated[
        int | None, typer.Option(min=1, help="Leave out requests with more prompt tokens than this.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Let answers reach their full length (vLLM and SGLang).")
    ] = False,
    seed: Annotated[int, typer.Option(help="Draws lengths, pictures and times.")] = 1,
    salt: Annotated[str | None, typer.Option(help="Draws the words. Default: random, in no cache.")] = None,
    model: Annotated[str | None, typer.Option(help="Default: the first of /v1/models.")] = None,
    policy: Annotated[str | None, typer.Option(help="An mmrouter's policy for these requests.")] = None,
    against_policy: Annotated[str | None, typer.Option(help="The same for --against.")] = None,
    encoder_modes: Annotated[
        str | None, typer.Option(help="Measure an mmrouter once in each of these modes: auto,perImage,perRequest.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds for a complete answer.")] = 120.0,
    api_key: Annotated[str | None, typer.Option(help="A client's API key.", envvar="OPENAI_API_KEY")] = None,
    against_api_key: Annotated[str | None, typer.Option(help="The same for --against. Default: --api-key.")] = None,
    control: Control = None,
    token: Token = None,
    cacert: CaCert = None,
    insecure: Insecure = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result, or both as a list; - prints it.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots.")] = None,
) -> None:
    """Measure any OpenAI-compatible endpoint under a load of conversations with pictures, or a trace.

    Exit status 1 where nothing was answered, a run was interrupted, or two runs cannot be compared.
    """
    from mmrouter_cli.bench import run_statistics, terminal
    from mmrouter_cli.bench.endpoint_probe import Target
    from mmrouter_cli.bench.run import run
    from mmrouter_cli.bench.types import BenchError, LoadSpec

    if rate is not None and concurrency is not None:
        leave("--rate and --concurrency are alternatives: give one of them")
    for option, value in (("--against-policy", against_policy), ("--against-api-key", against_api_key)):
        if against is None and value is not None:
            leave(f"{option} goes with --against")
    if encoder_modes is not None and against is not None:
        leave("--encoder-modes and --against are alternatives: give one of them")
    modes = _modes(encoder_modes)
    _check_outputs(json_file, html)
    width, _, height = image_size.partition("x")
    if not (width.isdigit() and height.isdigit() and all(1 <= int(side) <= MOST_PIXELS for side in (width, height))):
        leave(f"--image-size {image_size}: two numbers from 1 to {MOST_PIXELS}, like 448x448")
    load = LoadSpec(
        seed=seed,
        requests=requests,
        rate=rate,
        concurrency=concurrency,
        turns=turns,
        think=think,
        system_prompts=system_prompts,
        system_tokens=system_tokens,
        text_tokens=text_tokens,
        output_tokens=output_tokens,
        image_share=image_share,
        image_reuse=image_reuse,
        image_width=int(width),
        image_height=int(height),
        longest=longest,
        ignore_eos=ignore_eos,
    )
    tls = trust(cacert, insecure)
    console = Console(stderr=str(json_file) == "-")
    if not console.is_terminal:
        console.width = WIDTH

    def side(source: str, by: str | None, key: str | None, mode: str | None = None) -> "Target | list[Result]":
        """Return an endpoint to measure, or the runs of a file; ends on a bad one before anything is sent."""
        if _ADDRESS.match(source) and not Path(source).exists():
            source = with_scheme(source)
        if not source.startswith(("http://", "https://")):
            return _read_results(Path(source))
        # Every mode has pictures of its own, because encoders hold those of the mode before.
        words = (salt or secrets.token_hex(4)) + (f"-{mode}" if mode else "")
        return Target(_base_url(source), words, timeout, model, by, mode, key, control, token, tls)

    sides = [side(url, policy, api_key, mode) for mode in modes or (None,)]
    if against is not None:
        sides.append(side(against, against_policy, against_api_key or api_key))
    count = sum(1 if isinstance(each, Target) else len(each) for each in sides)
    if modes and not all(isinstance(each, Target) for each in sides):
        leave("--encoder-modes measures an endpoint: a result file has its modes already")
    read = [result for each in sides if not isinstance(each, Target) for result in each]
    if count > MOST_RUNS and not modes and not (len(read) == count and run_statistics.by_mode(read)):
        leave(f"two runs are compared, and these are {count}")
    results: list[Result] = []
    schedule: tuple[LoadSpec, list[Conversation], int] | None = None
    failure, status = "", USAGE
    try:
        for each in sides:
            if isinstance(each, Target):
                schedule = schedule or _make_schedule(load, trace)
                results.append(asyncio.run(run(each, *schedule, Console(stderr=True))))
                terminal.show(console, results[-1])
                if results[-1].interrupted or not results[-1].answered:
                    break
            else:
                for result in each:
                    terminal.show(console, result)
                results += each
    except BenchError as error:
        failure = str(error)
    except KeyboardInterrupt:
        failure, status = "interrupted before a request was sent", FAILED
    if failure:
        # The first run may have taken an hour: keep it although the second one failed.
        _write(results, json_file, html)
        typer.echo(f"mmrouter: {failure}", err=True)
        raise typer.Exit(status)
    modal = run_statistics.by_mode(results)
    compared = len(results) == 2 and not modal
    objections = run_statistics.objections(*results) if compared else []
    if compared and not objections:
        terminal.show_comparison(console, *results)
    if modal:
        terminal.show_modes(console, results)
    _write(results, json_file, html)
    if len(results) < count:
        objections = ["not all runs took place"] if modes else ["there is no second run"]
    for objection in objections:
        typer.echo(f"mmrouter: not compared: {objection}", err=True)
    failed = objections or any(result.interrupted or not result.answered for result in results)
    raise typer.Exit(FAILED if failed else 0)


def _modes(listed: str | None) -> tuple[str, ...]:
    """Return the encoder modes of an option; ends the command on another word."""
    from mmrouter_lib.api.routing import EncoderScheduling

    modes = tuple(dict.fromkeys(listed.split(","))) if listed is not None else ()
    if unknown := [mode for mode in modes if mode not in get_args(EncoderScheduling)]:
        leave(f"--encoder-modes {unknown[0]!r}: modes are {', '.join(get_args(EncoderScheduling))}")
    return modes


def _make_schedule(load: "LoadSpec", file: Path | None) -> "tuple[LoadSpec, list[Conversation], int]":
    """Return the load as the conversations to send describe it, these, and how many requests were left out."""
    from mmrouter_cli.bench import traces, workload

    if file is None:
        if load.paced and load.rate is None:
            load = msgspec.structs.replace(load, concurrency=DEFAULT_CONCURRENCY)
        source = workload.synthetic(load)
    else:
        trace = traces.read(file)
        load = traces.load_of(trace, load, DEFAULT_CONCURRENCY)
        source = traces.conversations(trace, load)
    conversations, left_out = workload.select(source, load)
    count = sum(len(conversation.turns) for conversation in conversations)
    return msgspec.structs.replace(load, requests=count), conversations, left_out


def _base_url(url: str) -> str:
    parts = urlsplit(url)
    if not parts.hostname or parts.username is not None:
        leave(f"{parts.hostname or url} is no URL of an endpoint, like http://127.1.0.1:8000; keys go with --api-key")
    return url.rstrip("/").removesuffix("/v1")


def _read_results(file: Path) -> "list[Result]":
    from mmrouter_cli.bench.types import Result

    try:
        raw = file.read_bytes()
        if raw.lstrip().startswith(b"["):
            results: list[Result] = msgspec.json.decode(raw, type=Annotated[list[Result], msgspec.Meta(min_length=1)])
            return results
        return [msgspec.json.decode(raw, type=Result)]
    except OSError as error:
        leave(f"{file} is neither a URL nor a file that can be read: {error.strerror}")
    except msgspec.DecodeError as error:
        leave(f"{file} is no result of mmrouter bench: {error}")


def _check_outputs(json_file: Path | None, html: Path | None) -> None:
    """End before a long run where its results could not be written."""
    for file in (json_file, html):
        if file is None or str(file) == "-":
            continue
        folder = file.absolute().parent
        if not folder.is_dir():
            leave(f"cannot write {file}: there is no folder {folder}")
        if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
            leave(f"cannot write {file}: it is a folder, or not yours to write")
    if html is not None:
        try:
            import leather  # noqa: F401
        except ImportError:
            leave("--html needs the package leather: pip install 'mmrouter-k8s[report]'")


def _write(results: "list[Result]", json_file: Path | None, html: Path | None) -> None:
    if not results:
        return
    try:
        if json_file is not None:
            raw = msgspec.json.encode(results[0] if len(results) == 1 else results)
            if str(json_file) == "-":
                typer.echo(raw.decode())
            else:
                json_file.write_bytes(raw + b"\n")
        if html is not None:
            from mmrouter_cli.bench.html_report import page

            html.write_text(page(results))
    except OSError as error:
        leave(f"cannot write {error.filename}: {error.strerror}")
