"""Reading a frame while it arrives: layers are usable as soon as their bytes are there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvcore.codecs.frame_checks import check_plain
from kvcore.codecs.frame_format import HEADER_BYTES, FrameHeader
from kvcore.codecs.frame_reader import FrameReader
from kvcore.codecs.frame_values import Buffer, Digest, GroupInfo, byte_view
from kvcore.errors import CorruptFrameError

__all__ = ["stream_layers"]


def stream_layers(
    pieces: Iterable[Buffer],
    *,
    expect_namespace: bytes | None,
    expect_key: bytes | None,
    expect_groups: Sequence[GroupInfo] | None = None,
    digest: Digest,
) -> Iterator[tuple[FrameReader, int]]:
    """Yield each stored layer of a frame once its bytes have arrived, in order.

    The memory taken is at most twice what has arrived, whatever the header claims.

    Parameters
    ----------
    pieces : iterable of bytes-like
        The frame from front to back, cut anywhere: what a socket or a file gives.
    expect_namespace, expect_key, expect_groups, digest
        As in `FrameReader`.

    Yields
    ------
    reader : FrameReader
    index : int
        Place in ``reader.layers``: hand it to ``reader.decode_layers`` or ``reader.segments``, which verify the layer.

    Raises
    ------
    CorruptFrameError
        As `FrameReader` does, as soon as it shows; ``"truncated"`` where the pieces end before the frame does;
        ``"encrypted"`` for a frame that must be opened, whole, with its key first.

    Examples
    --------
    >>> for reader, i in stream_layers(pieces, ...):  # doctest: +SKIP
    ...     reader.decode_layers(backend, i, 1, rows.select(layers=(i, i + 1)))
    """
    buffer, size = bytearray(1 << 16), 0
    reader: FrameReader | None = None
    done = 0
    for piece in pieces:
        view = byte_view(piece)
        if size + len(view) > len(buffer):
            # A new one: views of the old one, which readers have handed out, stay good.
            larger = bytearray(max(2 * len(buffer), size + len(view)))
            larger[:size] = memoryview(buffer)[:size]
            buffer = larger
        memoryview(buffer)[size : size + len(view)] = view
        size += len(view)
        arrived = memoryview(buffer)[:size]
        if reader is not None:
            reader.extend(arrived)
        elif _has_head(arrived):
            reader = FrameReader(
                arrived,
                expect_namespace=expect_namespace,
                expect_key=expect_key,
                expect_groups=expect_groups,
                digest=digest,
                partial=True,
            )
            check_plain(reader.header)
        while reader is not None and done < reader.available_layers:
            yield reader, done
            done += 1
    if reader is None or size < reader.header.stored_bytes:
        wanted = "its head does" if reader is None else f"the {reader.header.stored_bytes} bytes of the frame do"
        raise CorruptFrameError(f"the pieces end after {size} bytes, before {wanted}", reason="truncated")


def _has_head(arrived: memoryview) -> bool:
    """Whether the head is there; an early look at magic, version and sizes refuses what is no frame."""
    if len(arrived) < HEADER_BYTES:
        return False
    header = FrameHeader.parse(arrived)
    if header.stored_bytes < header.head_bytes:
        raise CorruptFrameError(
            f"the header gives the frame {header.stored_bytes} bytes and its head alone {header.head_bytes}",
            reason="length",
        )
    return len(arrived) >= header.head_bytes
