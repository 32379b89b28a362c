"""Moves between two engines of one process, as the tests of gen/ make them."""

from collections.abc import Iterable

from torch import Tensor

from rlhfuse.gen.engine import Engine
from rlhfuse.gen.migration.kv_transfer import KVTransfer, TransferManifest
from rlhfuse.tasks.instance_limits import MoveMode


def import_sequences(engine: Engine, transfer: KVTransfer) -> list[int]:
    """Take all samples of a transfer in, block by block; returns ids whose tokens are run again."""
    with engine.import_sequences(transfer.manifest) as transaction:
        for number in transaction.missing_blocks:
            transaction.write([number], transfer.read([number], slice(None)))
        recomputed = transaction.recomputed
    return recomputed


def move_sequences(
    source: Engine, destination: Engine, sample_ids: Iterable[int], modes: MoveMode = "kv", as_bytes: bool = False
) -> list[int]:
    """Move unfinished samples, as they are or through what travels between processes; returns those whose tokens are
    run again. An exception leaves all in `source`."""
    with source.export_sequences(sample_ids, modes) as transfer:
        if as_bytes and transfer.manifest.num_blocks:
            transfer = through_bytes(transfer)
        return import_sequences(destination, transfer)


def through_bytes(transfer: KVTransfer) -> KVTransfer:
    """The same transfer made of what travels between processes: bytes, and one tensor of all blocks."""
    manifest = TransferManifest.from_bytes(transfer.manifest.to_bytes())
    assert manifest == transfer.manifest
    kv: Tensor = transfer.read(range(manifest.num_blocks), slice(None))
    return KVTransfer(manifest, lambda numbers, heads: kv[list(numbers)][..., heads, :])
