"""LMCache's CPU path, timed on request. Runs in the peer's environment, which need not have kvcore: see `peer.py`."""

from __future__ import annotations

import functools
import json
import os
import select
import sys
import time
from typing import Any

try:
    import torch
except ImportError as error:
    MISSING: ImportError | None = error  # the answer to whatever is asked
else:
    MISSING = None
    torch.set_num_threads(1)

BLOCKS, BLOCK, HEADS, WIDTH = 256, 16, 8, 128


@functools.cache
def slots(layers: int, tokens: int, layout: str, scatter: bool) -> Any:
    from lmcache.lmcache_native import EngineKVFormat, TransferDirection
    from lmcache.v1.platform.torch_ops import mem_kernels

    mla = layout == "MLA"
    shape = (BLOCKS * BLOCK, 576) if mla else (2, BLOCKS * BLOCK, HEADS * WIDTH)
    paged = [torch.randn(shape).to(torch.bfloat16) for _ in range(layers)]
    chunk = torch.zeros(1 if mla else 2, layers, tokens, shape[-1], dtype=torch.bfloat16)
    index = torch.randperm(BLOCKS * BLOCK)[:tokens].to(torch.int64)
    form = EngineKVFormat.NL_X_NB_BS_HS if mla else EngineKVFormat.NL_X_TWO_NB_BS_NH_HS
    way = TransferDirection.H2D if scatter else TransferDirection.D2H
    device = torch.device("cpu")
    return lambda: mem_kernels.multi_layer_kv_transfer(
        chunk, paged, index, device, BLOCKS * BLOCK, way, form, BLOCK, 576 if mla else WIDTH, 0
    )


@functools.cache
def blocks(layers: int, tokens: int, layout: str, scatter: bool) -> Any:
    from lmcache.lmcache_native import EngineKVFormat, PageBufferShapeDesc, TransferDirection
    from lmcache.v1.platform.torch_ops import mp_mem_kernels

    shape, form, sides, heads, width = {
        "NHD": ((2, BLOCKS, BLOCK, HEADS, WIDTH), EngineKVFormat.NL_X_TWO_NB_BS_NH_HS, 2, HEADS, WIDTH),
        "HND": ((2, BLOCKS, HEADS, BLOCK, WIDTH), EngineKVFormat.NL_X_TWO_NB_NH_BS_HS, 2, HEADS, WIDTH),
        "MLA": ((BLOCKS, BLOCK, 576), EngineKVFormat.NL_X_NB_BS_HS, 1, 1, 576),
    }[layout]
    paged = [torch.randn(shape).to(torch.bfloat16) for _ in range(layers)]
    flat = (layers, tokens, 576) if layout == "MLA" else (2, layers, tokens, HEADS * WIDTH)
    chunk = torch.zeros(flat, dtype=torch.bfloat16)
    desc = PageBufferShapeDesc()
    desc.kv_size, desc.nl, desc.nb, desc.bs, desc.nh, desc.hs = sides, layers, BLOCKS, BLOCK, heads, width
    desc.element_size, desc.block_stride_elems = 2, 0
    index = torch.randperm(BLOCKS)[: tokens // BLOCK].to(torch.int64)
    way = TransferDirection.H2D if scatter else TransferDirection.D2H
    return lambda: mp_mem_kernels.multi_layer_block_kv_transfer(
        paged, [chunk], index, "cpu", way, desc, tokens, form, 0
    )


def memory(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator
    from lmcache.v1.memory_management import MemoryFormat

    return AdHocMemoryAllocator("cpu").allocate(torch.Size(shape), dtype, MemoryFormat.KV_2LTD)


def binary(nbytes: int) -> Any:
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    about = MemoryObjMetadata(
        shape=torch.Size([nbytes]), dtype=torch.uint8, address=0, phy_size=nbytes, ref_count=1,
        fmt=MemoryFormat.BINARY_BUFFER,
    )  # fmt: skip
    return TensorMemoryObj(torch.zeros(nbytes, dtype=torch.uint8), about, parent_allocator=None)


def object_key() -> Any:
    from lmcache.v1.distributed.api import ObjectKey

    return ObjectKey(chunk_hash=b"\0" * 16, model_name="m", kv_rank=0, cache_salt="")


def noise(shape: tuple[int, ...]) -> Any:
    source = memory(shape, torch.bfloat16)
    source.tensor.copy_(torch.randn(shape).to(torch.bfloat16))
    return source


@functools.cache
def fp8(shape: tuple[int, ...], back: bool) -> Any:
    from lmcache.v1.distributed.serde.fp8 import Fp8QuantizationDeserializer, Fp8QuantizationSerializer

    source, target = noise(shape), memory(shape, torch.bfloat16)
    coded, key = binary(source.tensor.numel()), object_key()
    there = Fp8QuantizationSerializer(torch.float8_e4m3fn)
    here = Fp8QuantizationDeserializer(torch.float8_e4m3fn)
    there.serialize(source, coded, key)
    return (lambda: here.deserialize(coded, target, key)) if back else (lambda: there.serialize(source, coded, key))


@functools.cache
def aesgcm(shape: tuple[int, ...], bits: int, back: bool) -> Any:
    from lmcache.v1.distributed.serde import aesgcm as serde
    from lmcache.v1.distributed.serde.key_provider import HkdfKeyProvider

    source, target = noise(shape), memory(shape, torch.bfloat16)
    coded, key = binary(source.get_size() + serde._FRAME_OVERHEAD), object_key()
    keys = HkdfKeyProvider(b"k" * 32, bits // 8, serde._HKDF_INFO_PREFIX)
    there, here = serde.AesGcmSerializer(keys), serde.AesGcmDeserializer(keys)
    there.serialize(source, coded, key)
    return (lambda: here.deserialize(coded, target, key)) if back else (lambda: there.serialize(source, coded, key))


@functools.cache
def fs(shape: tuple[int, ...], folder: str, back: bool) -> Any:
    """An object to a file or back, by the adapter's tasks. It does not store what is there: the file goes before."""
    from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig

    adapter = FSL2Adapter(FSL2AdapterConfig(folder))
    source, target, key = noise(shape), memory(shape, torch.bfloat16), object_key()
    path = adapter._key_to_path(key)

    def wait(fd: int) -> None:
        select.select([fd], [], [], 60)
        os.read(fd, 8)

    def store() -> None:
        adapter.submit_store_task([key], [source])
        wait(adapter.get_store_event_fd())
        (result,) = adapter.pop_completed_store_tasks().values()
        if path.stat().st_size != source.get_size():
            raise RuntimeError(f"stored {result}")

    def load() -> None:
        task = adapter.submit_load_task([key], [target])
        wait(adapter.get_load_event_fd())
        result = adapter.query_load_result(task)
        if result is None or not result.test(0):
            raise RuntimeError("not loaded")

    def remove() -> None:
        path.unlink(missing_ok=True)

    remove()
    store()
    if back:
        return load
    store.before = remove  # type: ignore[attr-defined] # which `answer` calls, and does not time
    return store


@functools.cache
def rope(tokens: int, dtype: str) -> Any:
    from lmcache.v1.platform.torch_ops import pos_kernels

    kind = getattr(torch, dtype)
    inverse = 1.0 / (10000 ** (torch.arange(0, WIDTH, 2).float() / WIDTH))
    angles = torch.arange(16384).float()[:, None] * inverse
    table = torch.cat([angles.cos(), angles.sin()], -1).to(kind)
    keys = torch.randn(tokens, HEADS, WIDTH).to(kind)
    old = torch.arange(tokens)
    new = old + 5000
    return lambda: pos_kernels.rotary_embedding_k_fused(old, new, keys, WIDTH, table, True)


@functools.cache
def cachegen(path: str, tokens: int, back: bool) -> Any:
    """The whole codec, bytes included, on the KV of a file: bfloat16 bits as int16 ``[layers, 2, T, heads, width]``."""
    import numpy as np
    from lmcache.storage_backend.serde import cachegen_basics, cachegen_decoder, cachegen_encoder

    kv = torch.from_numpy(np.load(path)).view(torch.bfloat16)[:, :, :tokens].contiguous()
    layers, _, _, heads, width = kv.shape
    keys = torch.tensor([32.0] * min(2, layers) + [16.0] * max(0, layers - 2))
    values = torch.tensor([32.0] + [16.0] * (layers - 1))
    config = cachegen_basics.CacheGenConfig(layers, [], [])

    def encode() -> Any:
        return cachegen_encoder.encode_function(kv, config, keys, values, tokens).to_bytes()

    blob = encode()

    def decode() -> Any:
        coded = cachegen_basics.CacheGenGPUEncoderOutput.from_bytes(blob)
        out = torch.zeros((tokens, 2 * layers * heads * width), dtype=torch.uint8)
        k, v = cachegen_decoder.decode_function_gpu(coded.cdf, coded.data_chunks, layers, tokens, out)
        both = (
            cachegen_decoder.do_dequantize(k, keys, coded.max_tensors_key),
            cachegen_decoder.do_dequantize(v, values, coded.max_tensors_value),
        )
        return torch.stack(both)

    return decode if back else encode


WORK = {
    "slots": slots, "blocks": blocks, "fp8": fp8, "aesgcm": aesgcm, "fs": fs, "rope": rope, "cachegen": cachegen,
}  # fmt: skip


def answer(request: dict[str, Any]) -> dict[str, Any]:
    if MISSING is not None:
        raise MISSING
    what, loops = request.pop("what"), request.pop("loops", 1)
    if what == "hello":
        from importlib.metadata import version

        return {"name": f"LMCache {version('lmcache')}, torch {torch.__version__}"}
    if "shape" in request:
        request["shape"] = tuple(request["shape"])
    work = WORK[what](**request)
    before, seconds = getattr(work, "before", lambda: None), 0.0
    if loops == 1:  # the first request of a kind, which finds out how long it takes
        before()
        work()
    for _ in range(loops):
        before()  # not timed
        start = time.perf_counter()
        work()
        seconds += time.perf_counter() - start
    return {"seconds": seconds / loops}


def main() -> None:
    for line in sys.stdin:
        try:
            result = answer(json.loads(line))
        except Exception as error:  # noqa: BLE001  # whatever the peer raises is the answer
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
