"""Target ``soak``: ``mmrouter up`` under load in real time; memory, descriptors, threads and journals are flat.

An input is a number of seconds and a seed of the clients. The outcome is ``filling`` until growth can be judged.
"""

import random
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import psutil
from campaign.faults.clients import Clients
from campaign.faults.observation import Observer
from campaign.soak.flatness import growth, is_flat
from campaign.target import BrokenPropertyError, Target
from local.rig import ROOT, running

SECONDS = 30
CLIENTS = 8  # as many as fill every table in an hour, beside the other targets, on two CPUs
TOPICS = 20_000  # so many that caches are full after some minutes, and blocks are evicted from then on
COMMANDS = ("router", "sidecar", "vllm")
SATURATION = 120_000
"""Requests until every bounded table is full: caches of segments and of routers' decisions are the slowest. A count, as
a busy machine needs several times as long for them.
"""
JUDGED = 60
"""Inputs after that from which on growth is a failure, half an hour; a shorter run only has figures."""
SHARE = 0.05
LEAST = {"MiB": 6.0, "MiB journal": 20.0, "descriptors": 8.0, "threads": 2.0, "blocks": 3000.0}
"""Growth from the third quarter of the run to the last one that counts as flat: this share, or this much. Allocators
keep fragments, descriptors follow the connections of clients, a journal is rewritten at 16 MiB.
"""


class Soak(Target):
    """One deployment from the first input to the last."""

    name = "soak"
    short = 0
    in_process = False
    whole_run = True
    limit_s = 600.0

    def __init__(self) -> None:
        super().__init__()
        self._samples: dict[str, list[float]] = {}
        self._requests = self._inputs = 0
        self._filled = 0  # inputs until the tables were full
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._deployment = self._stack.enter_context(running(ROOT / "examples" / "demo.yaml"))
        self._observer = Observer(self._deployment)
        self._stack.callback(self._observer.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def draw(self, source: random.Random, kept: Sequence[bytes]) -> bytes:
        return f"{SECONDS} {source.randrange(10**6)}".encode()

    def check(self, data: bytes) -> str:
        seconds, seed = data.decode().split()
        clients = Clients(self._deployment.url, "demo", int(seed), topics=TOPICS, clients=CLIENTS)
        with clients.asking():
            time.sleep(float(seconds))
        for outcome, count in clients.answers.outcomes.items():
            self.totals[outcome] += count
            self._requests += count
        self.totals["seconds"] += int(seconds)
        self._sample()
        self._inputs += 1
        if self._requests < SATURATION:
            self._filled = self._inputs
        broken = [*clients.answers.broken, *self._grown()]
        if broken:
            raise BrokenPropertyError("; ".join(broken[:5]))
        return "flat" if self._judged else "filling"

    @property
    def _judged(self) -> bool:
        return self._inputs - self._filled >= JUDGED

    def _sample(self) -> None:
        for command in COMMANDS:
            for pod, process in self._deployment.processes(command).items():
                with suppress(psutil.NoSuchProcess):
                    self._add(f"MiB {command} {pod}", process.memory_info().rss / 2**20)
                    self._add(f"descriptors {command} {pod}", process.num_fds())
                    self._add(f"threads {command} {pod}", process.num_threads())
        for journal in Path(self._deployment.folder).glob("*/state/ledger.journal"):
            self._add(f"MiB journal {journal.parts[-3]}", journal.stat().st_size / 2**20)
        for number, frontend in enumerate(self._deployment.frontends):
            held = sum(sum(worker["held"].values()) for worker in self._observer.workers(frontend))
            self._add(f"blocks index {number}", held)

    def _add(self, name: str, value: float) -> None:
        self._samples.setdefault(name, []).append(value)

    def _grown(self) -> list[str]:
        """Return what is not flat; keep the largest growth of each kind for the campaign's table."""
        found, found_growth = [], dict[str, float]()
        for name, all_samples in self._samples.items():
            unit, kind, _ = name.split()
            samples = all_samples[self._filled if self._judged else 0 :]
            what = f"{unit} grown in a {kind}"
            self.largest[what] = max(round(growth(samples), 1), found_growth.get(what, 0.0))
            found_growth[what] = self.largest[what]
            share = SHARE if unit in ("MiB", "blocks") else 0.0
            least = LEAST.get(f"{unit} {kind}", LEAST[unit])
            if self._judged and not is_flat(samples, share=share, least=least):
                found.append(f"{name} grows by {growth(samples):.1f}: {[round(value, 1) for value in samples]}")
        return found
