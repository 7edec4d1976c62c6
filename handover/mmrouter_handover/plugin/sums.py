"""The checksum of an item that travels over the network: the sampled one of ``mmrouter_handover.shm``."""

from mmrouter_handover.shm.slot_format import checksum as transfer_checksum


def checksum(payload: memoryview) -> int:
    """Return CRC-32 of a sample of ``payload``, which is flat and of bytes. It is the second proof, not the first."""
    return transfer_checksum(payload, "sampled")
