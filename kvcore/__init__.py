"""kvcore: move, shrink, store and restore KV caches on any hardware, with the same bytes on every vendor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.arrays import ArrayRef
    from kvcore.cachespec import CacheGroup, KVCacheSpec
    from kvcore.errors import (
        BackendLoadError,
        ConfigError,
        CorruptFrameError,
        DeviceError,
        KVCoreError,
        LayoutError,
        LeaseError,
        NoBackendError,
        OutOfMemoryError,
        QuantizationError,
        SlotError,
        StoreError,
        UnsupportedOpError,
    )
    from kvcore.hookspecs.markers import hookimpl, supports
    from kvcore.kernels import get_include
    from kvcore.layout import Layout
    from kvcore.memory import BufferPool, KVMeta, LayoutDesc, MemoryObj, chunk_desc
    from kvcore.ops import Backend, Plan, explain, open_backend
    from kvcore.plugins import API_VERSION, BackendSpec, Probe
    from kvcore.quant import Quantized, QuantSpec
    from kvcore.rope import RopeParams
    from kvcore.rows import RowLayout

__version__ = "0.1.0.dev0"

# Public name -> the module that has it. Nothing is imported before it is used, so `import kvcore` costs almost nothing.
_HOME = {
    "kvcore.arrays": ("ArrayRef",),
    "kvcore.cachespec": ("CacheGroup", "KVCacheSpec"),
    "kvcore.errors": (
        "BackendLoadError",
        "ConfigError",
        "CorruptFrameError",
        "DeviceError",
        "KVCoreError",
        "LayoutError",
        "LeaseError",
        "NoBackendError",
        "OutOfMemoryError",
        "QuantizationError",
        "SlotError",
        "StoreError",
        "UnsupportedOpError",
    ),
    "kvcore.hookspecs.markers": ("hookimpl", "supports"),
    "kvcore.kernels": ("get_include",),
    "kvcore.layout": ("Layout",),
    "kvcore.memory": ("BufferPool", "KVMeta", "LayoutDesc", "MemoryObj", "chunk_desc"),
    "kvcore.ops": ("Backend", "Plan", "explain", "open_backend"),
    "kvcore.plugins": ("API_VERSION", "BackendSpec", "Probe"),
    "kvcore.quant": ("QuantSpec", "Quantized"),
    "kvcore.rope": ("RopeParams",),
    "kvcore.rows": ("RowLayout",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "API_VERSION",
    "ArrayRef",
    "Backend",
    "BackendLoadError",
    "BackendSpec",
    "BufferPool",
    "CacheGroup",
    "ConfigError",
    "CorruptFrameError",
    "DeviceError",
    "KVCacheSpec",
    "KVCoreError",
    "KVMeta",
    "Layout",
    "LayoutDesc",
    "LayoutError",
    "LeaseError",
    "MemoryObj",
    "NoBackendError",
    "OutOfMemoryError",
    "Plan",
    "Probe",
    "QuantSpec",
    "QuantizationError",
    "Quantized",
    "RopeParams",
    "RowLayout",
    "SlotError",
    "StoreError",
    "UnsupportedOpError",
    "__version__",
    "chunk_desc",
    "explain",
    "get_include",
    "hookimpl",
    "open_backend",
    "supports",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'kvcore' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
