"""Requests with images for encoders, drawn from statistics of a real service.

The statistics are ``servegen_images.json``: for each client its share of the requests, the distribution of images per
request (0 to 12) and quantiles of an image's visual tokens, of a request's text and of an answer. They are derived from
alibaba/ServeGen data/multimodal/mm-image @f891d1189e (Apache-2.0), a day of a production image service;
``python -m bench.encoders.image_requests FOLDER`` derives them again.
"""

import ast
import csv
import random
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from mmrouter_cli.bench.traces import Client, read

SAMPLE: Final = Path(__file__).with_name("servegen_images.json")
SOURCE: Final = "derived from alibaba/ServeGen data/multimodal/mm-image @f891d1189e, Apache-2.0"
MOST_IMAGES: Final = 12
QUANTILES: Final = 20
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


def derive(folder: Path) -> dict[str, Any]:
    """Return the statistics from ServeGen's files: each client's windows of a day, weighted by their requests."""
    clients = []
    for trace in sorted(folder.glob("chunk-*-trace.csv"), key=lambda path: int(path.name.split("-")[1])):
        with trace.open() as file:
            rates = [(int(float(row[0])), float(row[1])) for row in csv.reader(file)]
        windows = msgspec.json.decode(trace.with_name(trace.name.replace("trace.csv", "dataset.json")).read_bytes())
        counts: defaultdict[int, float] = defaultdict(float)
        tokens: defaultdict[int, float] = defaultdict(float)
        texts: defaultdict[int, float] = defaultdict(float)
        outputs: defaultdict[int, float] = defaultdict(float)
        requests = 0.0
        for start, window in windows.items():
            asked = sum(600 * rate for second, rate in rates if int(start) <= second < int(start) + 21_600)
            if not window or not asked:
                continue
            requests += asked
            number, size = _distribution(window["image_count"]), _distribution(window["image_tokens"])
            for images, share in number.items():
                counts[images] += asked * share
            mean = sum(images * share for images, share in number.items())
            for value, share in size.items():
                tokens[max(1, value)] += asked * mean * share
            for weights, field in ((texts, "text_tokens"), (outputs, "output_tokens")):
                for value, share in _distribution(window[field]).items():
                    weights[max(1, value)] += asked * share
        shown = [counts[images] for images in range(MOST_IMAGES + 1)]
        if sum(shown) and tokens:
            shares = [float(f"{share / sum(shown):.4g}") for share in shown]
            clients.append(Client(requests, shares, _quantiles(tokens), _quantiles(texts), _quantiles(outputs)))
    total = sum(client.share for client in clients)
    weighted = [msgspec.structs.replace(client, share=float(f"{client.share / total:.4g}")) for client in clients]
    return {"source": SOURCE, "clients": weighted}


def _distribution(text: str) -> Mapping[int, float]:
    return {int(value): float(share) for value, share in ast.literal_eval(text).items()}


def _quantiles(weights: Mapping[int, float]) -> list[int]:
    """Return the medians of :data:`QUANTILES` equally likely parts."""
    total, seen = sum(weights.values()), 0.0
    quantiles: list[int] = []
    for value, weight in sorted(weights.items()):
        seen += weight
        while len(quantiles) < QUANTILES and seen >= total * (len(quantiles) + 0.5) / QUANTILES:
            quantiles.append(value)
    return quantiles


if __name__ == "__main__":
    SAMPLE.write_bytes(msgspec.json.format(msgspec.json.encode(derive(Path(sys.argv[1]))), indent=0) + b"\n")
