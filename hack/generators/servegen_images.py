"""Derive the statistics of a production image service that the benchmarks draw requests from.

    .venv/bin/python -m hack.generators.servegen_images FOLDER

``FOLDER`` is data/multimodal/mm-image of alibaba/ServeGen @f891d1189e (Apache-2.0), a day of the service. Writes
``bench/encoders/servegen_images.json``.
"""

import ast
import csv
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.encoders.image_requests import SAMPLE
from mmrouter_cli.bench.traces import Client

SOURCE: Final = "derived from alibaba/ServeGen data/multimodal/mm-image @f891d1189e, Apache-2.0"
MOST_IMAGES: Final = 12
QUANTILES: Final = 20


def derive(folder: Path) -> dict[str, Any]:
    """Return the statistics of ServeGen's files: each client's windows of a day, weighted by their requests."""
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
