"""Requests, and what else vLLM's scheduler hands a connector: stand-ins, or vLLM's own where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

_SPEC = importlib.util.find_spec("vllm")
HAS_VLLM = _SPEC is not None and _SPEC.origin is not None  # else it is a folder of this name
KINDS = ["stand-in", "vllm"] if HAS_VLLM else ["stand-in"]
"""Parameters of a fixture that gives a `Maker`: of either kind, where there are both."""

_MODULES = ("lora.request", "multimodal.inputs", "sampling_params", "v1.core.kv_cache_manager", "v1.core.sched.output")


def import_for(kind: str) -> None:
    """Import what is needed of vLLM for its own kind; imports warn about what its own dependencies deprecate."""
    if kind == "vllm":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in _MODULES:
                importlib.import_module(f"vllm.{name}")


@dataclass
class StandInRequest:
    """What the connector reads of ``vllm.v1.request.Request``."""

    request_id: str
    prompt_token_ids: list[int] | None
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    mm_features: list[Any] = field(default_factory=list)
    lora_request: Any = None
    cache_salt: str | None = None
    resumable: bool = False
    skip_reading_prefix_cache: bool = False
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        if self.prompt_token_ids is None:
            self.num_prompt_tokens = len(self.prompt_embeds)
            self._all_token_ids = [0] * self.num_prompt_tokens
        else:
            self.num_prompt_tokens = len(self.prompt_token_ids)
            mask = self.prompt_is_token_ids or [True] * self.num_prompt_tokens
            self._all_token_ids = [
                t if is_token else 0 for t, is_token in zip(self.prompt_token_ids, mask, strict=True)
            ]
        self.mm_features = self.mm_features or []

    @property
    def all_token_ids(self) -> list[int]:
        return self._all_token_ids

    @property
    def num_tokens(self) -> int:
        return len(self._all_token_ids)

    def append_output_token_ids(self, token: int) -> None:
        self._all_token_ids.append(token)


class Maker:
    """Makes requests of one kind."""

    def __init__(self, kind: str) -> None:
        import_for(kind)
        self.real = kind == "vllm"

    def request(self, name: str, tokens: list[int] | None, *, skip_reading: bool = False, **more: Any) -> Any:
        if not self.real:
            return StandInRequest(name, tokens, skip_reading_prefix_cache=skip_reading, **more)
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=16, skip_reading_prefix_cache=skip_reading)
        return Request(name, tokens, params, None, **more)

    def feature(self, name: str, offset: int, length: int, *, modality: str = "image", mask: Any = None) -> Any:
        if not self.real:
            place = SimpleNamespace(offset=offset, length=length, is_embed=mask)
            return SimpleNamespace(data=None, modality=modality, identifier=name, mm_position=place, mm_hash=name)
        import torch
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

        place = PlaceholderRange(offset, length, None if mask is None else torch.tensor(mask))
        return MultiModalFeatureSpec(None, modality, name, place, name)

    def lora(self, name: str, number: int, path: Any) -> Any:
        if not self.real:
            return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path))
        from vllm.lora.request import LoRARequest

        return LoRARequest(name, number, str(path))

    def blocks(self, tables: tuple[list[int], ...]) -> Any:
        if not self.real:
            return SimpleNamespace(get_block_ids=lambda: tuple(list(table) for table in tables))
        from vllm.v1.core.kv_cache_manager import KVCacheBlocks
        from vllm.v1.core.kv_cache_utils import KVCacheBlock

        return KVCacheBlocks(tuple([KVCacheBlock(block) for block in table] for table in tables))

    def output(
        self,
        *,
        new: list[tuple[Any, tuple[list[int], ...], int]] = (),  # type: ignore[assignment]
        cached: list[tuple[Any, tuple[list[int], ...] | None, int]] = (),  # type: ignore[assignment]
        resumed: set[str] = frozenset(),  # type: ignore[assignment]
        scheduled: dict[str, int],
        preempted: set[str] | None = None,
        tables: dict[str, tuple[list[int], ...]] | None = None,
    ) -> Any:
        """A `SchedulerOutput`; `tables` as newer engines give them, None as older ones do."""
        names = [request.request_id for request, _, _ in cached]
        if not self.real:
            state = None
            if tables is not None:
                state = SimpleNamespace(get_block_ids=lambda name: tables.get(name))
            return SimpleNamespace(
                scheduled_new_reqs=[
                    SimpleNamespace(req_id=request.request_id, block_ids=blocks, num_computed_tokens=computed)
                    for request, blocks, computed in new
                ],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=names,
                    resumed_req_ids=set(resumed),
                    new_block_ids=[blocks for _, blocks, _ in cached],
                    num_computed_tokens=[computed for _, _, computed in cached],
                ),
                num_scheduled_tokens=scheduled,
                preempted_req_ids=preempted,
                kv_connector_block_state=state,
            )
        from vllm.v1.core.sched.output import (
            CachedRequestData,
            KVConnectorBlockState,
            NewRequestData,
            SchedulerOutput,
        )

        output = SchedulerOutput.make_empty()
        for request, blocks, computed in new:
            request.num_computed_tokens = computed
            output.scheduled_new_reqs.append(NewRequestData.from_request(request, blocks))
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=names,
            resumed_req_ids=set(resumed),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[blocks for _, blocks, _ in cached],
            num_computed_tokens=[computed for _, _, computed in cached],
            num_output_tokens=[request.num_output_tokens for request, _, _ in cached],
        )
        output.num_scheduled_tokens = scheduled
        output.total_num_scheduled_tokens = sum(scheduled.values())
        output.preempted_req_ids = preempted
        if tables is not None:
            output.kv_connector_block_state = KVConnectorBlockState(set(tables), lambda name: tables[name], {})
        return output
