"""Defects of composites: codecs that a backend computes in one piece, from the reference's ops and with one mistake."""

# ruff: noqa: D103 -- a defect says in its name what is wrong
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcore import Backend, open_backend
from kvcore.codecs import composites, kvs1, segments
from kvcore.codecs.chunk_rows import allocate_rows
from kvcore.codecs.contract import part_arrays
from kvcore.codecs.tables import table_set
from kvcore.dtypes import finite_max
from kvcore.rope import rope_table
from kvcore.rows import RowLayout
from kvcore_conformance.mutants.catalogue import COMPOSITES, Call, mutant


def _reference() -> Backend:
    return open_backend("cpu_ref", fallback="error")


def _encode_segments(
    x: Any,
    *,
    tables: Any,
    rule: Any,
    raw_rows: Sequence[Sequence[int]] = (),
    raw_values: Any = None,
    unroped: bool = False,
    names: Sequence[str] | None = None,
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    known = {"raw_rows": raw_rows, "raw_values": raw_values, "unroped": unroped, "names": names}
    return segments.encode_segments(_reference(), x, tables=tables, rule=rule, **known)


def _gather_encode(
    src: RowLayout,
    index: Any,
    *,
    codec: Any,
    group: Any,
    unit: str = "slot",
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    return composites.gather_encode(_reference(), codec, src, index, group, unit=unit)


COMPOSITES.update(encode_segments=_encode_segments, gather_encode=_gather_encode)


@mutant("encode_segments")
def raw_rows_shared_by_all_segments(call: Call) -> Any:
    rows = call.kwargs["raw_rows"]
    together = sorted({row for one in rows for row in one})
    if len(together) <= segments.MAX_RAW_ROWS:
        call.kwargs["raw_rows"] = [together] * len(rows)
    return call.run()


@mutant("encode_segments")
def raw_rows_stored_without_their_rope(call: Call) -> Any:
    x, original = call.args[0], call.kwargs["raw_values"]
    if call.kwargs["unroped"]:
        call.kwargs["raw_values"] = x.astype(original.dtype)
    return call.run()


@mutant("gather_encode")
def saturated_after_rope_is_taken_off(call: Call) -> Any:
    layers, codec, group = call.run(), call.kwargs["codec"], call.kwargs["group"]
    if getattr(codec, "nonfinite", "error") != "saturate" or group.rope is None:
        return layers
    backend, chunk = _reference(), allocate_rows(group)
    backend.gather_paged(*call.args, out=chunk)
    keys = part_arrays(backend, chunk, group)["K"].reshape(-1, group.rows, group.parts[0].width)
    cos, sin = rope_table(group.rope, -np.arange(group.base_position, group.base_position + group.rows))
    turned = np.empty(keys.shape, np.float32)
    backend.shift_rope(keys[:, :, None], cos, sin, interleaved=group.rope.interleaved, out=turned[:, :, None])
    limit = np.float32(finite_max(keys.dtype))
    coded = segments.encode_segments(
        backend,
        np.where(np.isnan(turned), np.float32(0), np.clip(turned, -limit, limit)),
        tables=table_set("gauss"),
        rule=segments.StepRule(kvs1.PRESETS[codec.name].constant),
        raw_rows=[[0] if group.base_position == 0 else []] * len(keys),
        raw_values=keys,
        unroped=True,
    )
    heads = group.head_count
    return [coded[i * heads : (i + 1) * heads] + layer[heads:] for i, layer in enumerate(layers)]
