"""Parts that a simulated SGLang encoder sends."""

import asyncio
import socket

import msgspec
import zmq.asyncio

from mmrouter_sim.encoders import Embedding, EncoderShares, Part


async def test_a_send_ends_after_its_receiver_is_reached_and_not_before() -> None:
    """An encoder answers after it. A part that was only queued would be lost with a process that is killed then."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shares, part = EncoderShares(), Part("r", 0, 1, [Embedding(7, 4)])
    sending = asyncio.create_task(shares.send("127.0.0.1", port, part))
    done, _ = await asyncio.wait((sending,), timeout=0.3)
    assert not done
    with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as receiving:
        receiving.bind(f"tcp://127.0.0.1:{port}")
        await sending
        assert msgspec.msgpack.decode(await receiving.recv(), type=Part) == part
    shares.close()
