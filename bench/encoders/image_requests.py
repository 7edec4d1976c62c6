"""Requests with images for encoders, drawn from statistics of a real service.

The statistics are ``servegen_images.json``: for each client its share of the requests, the distribution of images per
request (0 to 12) and quantiles of an image's visual tokens, of a request's text and of an answer
(``hack/generators/servegen_images.py``).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mmrouter_cli.bench.traces import Client, read

SAMPLE: Final = Path(__file__).with_name("servegen_images.json")
NOISE: Final = 0.2
"""Standard deviation of the logarithm of the true time over the line's time."""
OUTLIERS: Final = 0.005
OUTLIER: Final = 4.0
"""Share of images that take :data:`OUTLIER` times as long, and that factor."""
BURSTY_CV: Final = 2.0
"""Coefficient of variation of bursty inter-arrival times (gamma); Poisson has 1."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One image: its visual tokens, and ``luck``, its true time over the modelled time on any encoder."""

    tokens: int
    luck: float
    name: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: its time and its images (1 to 12; a request without images needs no encoder)."""

    at: float
    pictures: tuple[Picture, ...]


@dataclass(frozen=True, slots=True)
class Device:
    """An encoder's true speed: visual tokens per second, and a fixed time per image in seconds."""

    rate: float
    overhead: float

    def seconds(self, picture: Picture) -> float:
        return picture.luck * (self.overhead + picture.tokens / self.rate)


def load_clients() -> tuple[Client, ...]:
    return read(SAMPLE).clients


def image_sizes(rnd: random.Random, clients: Sequence[Client], requests: int) -> list[tuple[Picture, ...]]:
    """Return the images of so many requests with images. Names are unique."""
    shares = [client.share for client in clients]
    bodies: list[tuple[Picture, ...]] = []
    names = 0
    while len(bodies) < requests:
        client = rnd.choices(clients, shares)[0]
        (count,) = rnd.choices(range(len(client.counts)), client.counts)
        drawn = []
        for tokens in rnd.choices(client.tokens, k=count):
            luck = rnd.lognormvariate(0, NOISE) * (OUTLIER if rnd.random() < OUTLIERS else 1.0)
            names += 1
            drawn.append(Picture(tokens, luck, names))
        if drawn:
            bodies.append(tuple(drawn))
    return bodies


def arrivals(
    rnd: random.Random, bodies: Sequence[tuple[Picture, ...]], fleet: Sequence[Device], load: float, cv: float
) -> list[Arrival]:
    """Return requests at ``load``: mean work that arrives over the capacity of the whole fleet."""
    work = sum(shared(picture, fleet) for body in bodies for picture in body) / len(bodies)
    shape, now, requests = 1 / cv**2, 0.0, []
    for body in bodies:
        now += rnd.gammavariate(shape, work / load / shape)
        requests.append(Arrival(now, body))
    return requests


def shared(picture: Picture, fleet: Sequence[Device]) -> float:
    """Return the time of an image on one server with the sum of the rates: 1 / sum(1 / time on each)."""
    return 1 / sum(1 / device.seconds(picture) for device in fleet)
