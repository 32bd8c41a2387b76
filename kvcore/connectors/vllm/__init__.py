"""vLLM: prefix KV saved, evicted and restored by a connector out of tree.

``--kv-transfer-config '{"kv_connector": "KVCoreConnector", "kv_connector_module_path": "kvcore.connectors.vllm",
"kv_role": "kv_both"}'``. vLLM itself is imported with the connector, and not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.connectors.vllm.connector import KVCoreConnector

__all__ = ["KVCoreConnector"]


def __getattr__(name: str) -> Any:
    if name == "KVCoreConnector":
        from kvcore.connectors.vllm import connector

        return connector.KVCoreConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
