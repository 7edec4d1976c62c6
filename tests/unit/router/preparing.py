"""Preparation of requests with the repository's tiny model: settings, a preparer, and requests of content parts."""

import json
from contextlib import asynccontextmanager
from pathlib import Path

from unit.router.rig import resource

from mmrouter_cli.sample_images import data_uri, picture
from mmrouter_router.core.settings import CurveKeys, Settings
from mmrouter_router.intake import Limits, parse_chat
from mmrouter_router.media.resolve import MediaResolver
from mmrouter_router.request.prepare import Preparer
from mmrouter_router.telemetry.metrics import Metrics

MODEL = Path(__file__).resolve().parents[3] / "examples" / "models" / "tiny-qwen2-vl"
SIZE = 16


def settings(model_dir: Path = MODEL, processor=None, engine="vllm", args=(), spec=None, **media) -> Settings:
    engine = {"type": engine, "blockSize": SIZE, "processor": processor or {}, "args": list(args)}
    deployment = resource(engine=engine, routing={"media": media}, **(spec or {}))
    keys = (CurveKeys(b"", b"", b""),)
    return Settings(deployment, "r", "127.0.0.1", Path(), model_dir, bytes(32), "k", "t", keys)


@asynccontextmanager
async def preparing(own: Settings, **options):
    media = MediaResolver(own.deployment.spec.routing.media, metrics=Metrics())
    yield Preparer(own, media, **options)
    await media.close()


def chat(*parts, engine="vllm", **fields):
    """A parsed request of content parts and further fields."""
    body = {"model": "t", "messages": [{"role": "user", "content": list(parts)}], **fields}
    return parse_chat(json.dumps(body).encode(), Limits(), "t", engine)


def text(words):
    return {"type": "text", "text": words}


def image(seed, side=112):
    return {"type": "image_url", "image_url": {"url": data_uri(picture(seed, side, side))}}
