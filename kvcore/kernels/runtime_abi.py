"""The C ABI of a device's runtime, for ctypes: what `include/kvcore/runtime.h` declares. Names follow the header."""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["FUNCTIONS", "IPC_BYTES", "RUNTIME_VERSION", "DeviceInfoStruct", "IpcMemory", "TuningStruct"]

RUNTIME_VERSION = 1
IPC_BYTES = 64


class DeviceInfoStruct(ctypes.Structure):
    """`kv_device_info`."""

    _fields_ = (
        ("name", ctypes.c_char * 128),
        ("arch", ctypes.c_char * 64),
        ("memory_bytes", ctypes.c_int64),
        ("units", ctypes.c_int32),
        ("warp_width", ctypes.c_int32),
        ("driver_version", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


class TuningStruct(ctypes.Structure):
    """`kv_tuning`."""

    _fields_ = (
        ("engine_bytes", ctypes.c_int64),
        ("blocks_per_unit", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


class IpcMemory(ctypes.Structure):
    """`kv_ipc_memory`."""

    _fields_ = (
        ("handle", ctypes.c_ubyte * IPC_BYTES),
        ("offset", ctypes.c_int64),
        ("allocation_bytes", ctypes.c_int64),
    )


_I32, _I64, _U64, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p

FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "driver_open": (ctypes.c_char_p,),
    "device_count": (_POINTER,),
    "device_info": (_I32, _POINTER),
    "device_load": (_I32, ctypes.c_char_p, _I64, _POINTER),
    "device_use": (_I32,),
    "memory_allocate": (_I32, _I64, _POINTER),
    "memory_free": (_I32, _U64),
    "memory_place": (_U64, _POINTER),
    "host_register": (_U64, _I64),
    "host_unregister": (_U64,),
    "stream_create": (_I32, _U64, _I32, _POINTER),
    "stream_synchronize": (_POINTER,),
    "stream_check": (_POINTER, _POINTER),
    "stream_destroy": (_POINTER,),
    "event_record": (_POINTER, _I32, _POINTER),
    "event_passed": (_POINTER, _POINTER),
    "event_synchronize": (_POINTER,),
    "event_wait": (_POINTER, _POINTER),
    "event_destroy": (_POINTER,),
    "ipc_export_memory": (_U64, _POINTER),
    "ipc_import_memory": (_I32, _POINTER, _POINTER),
    "ipc_close_memory": (_I32, _U64),
    "ipc_export_event": (_POINTER, _POINTER),
    "ipc_import_event": (_I32, _POINTER, _POINTER),
}
"""Parameters of the functions that return 0 or a KV_FAIL code, each ``kvcore_<name>``."""
