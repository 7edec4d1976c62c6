"""Blocks of loopback addresses: each local deployment has one of its own, until its process ends."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from mmrouter_cli.local import loopback_network
from mmrouter_cli.local.loopback_network import AddressBlock, take_block

PORT = 8899
HOLDER = """
import sys, time
from mmrouter_cli.local import loopback_network
loopback_network.NETWORK = sys.argv[1]
block = loopback_network.take_block([])
print(block.number, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> str:
    """A network that no deployment on this machine uses."""
    monkeypatch.setattr(loopback_network, "NETWORK", network := f"127.{200 + os.getpid() % 50}")
    return network


@pytest.fixture
def blocks() -> Iterator[list[AddressBlock]]:
    taken = [take_block([PORT], 2) for _ in range(3)]
    yield taken
    for block in taken:
        block.close()


def test_deployments_beside_each_other_have_blocks_of_their_own(blocks: list[AddressBlock], network: str) -> None:
    assert [block.service for block in blocks] == [f"{network}.{number}.1" for number in range(3)]
    assert [blocks[1].next_pod() for _ in range(2)] == [f"{network}.1.2", f"{network}.1.3"]
    blocks[0].close()
    blocks[0] = take_block([PORT])
    assert blocks[0].number == 0


def test_a_block_is_free_when_the_process_that_took_it_is_killed(network: str) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, network], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "0\n"
        with closing(take_block([])) as block:
            assert block.number == 1
        holder.kill()
    with closing(take_block([])) as block:
        assert block.number == 0


@pytest.mark.parametrize("host", [1, 2, 3])
def test_a_block_where_another_process_uses_an_address_is_passed_over(network: str, host: int) -> None:
    with socket.create_server((f"{network}.0.{host}", PORT)), closing(take_block([PORT], 2)) as block:
        assert block.number == 1
