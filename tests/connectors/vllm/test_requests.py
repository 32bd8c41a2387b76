"""Whose KV a request's is: on stand-ins of vLLM's requests, and on vLLM's own where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore.connectors.vllm.requests import AdapterNames, RequestIdentity, Uncacheable, identify
from kvcore.engine.keys import ChunkKey, Namespace, chunk_keys

from .requests_made import HAS_VLLM, KINDS, Maker

SPACE = Namespace("model", "1", chunk_tokens=16, kv_dtype="float32")
CAT, DOG = "ca" * 32, "d0" * 32


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Maker:
    return Maker(request.param)


@pytest.mark.skipif(
    not HAS_VLLM,
    reason="vLLM is not installed here: requests, identity and scheduler were tested on stand-ins of its classes only; "
    "make vllm-env, and run tests/connectors/vllm with its Python too",
)
def test_stand_ins_have_nothing_that_vllms_own_classes_lack() -> None:
    def made(make: Maker) -> list[Any]:
        request, feature = make.request("r", [1, 2]), make.feature(CAT, 0, 1)
        output = make.output(
            new=[(request, ([1],), 0)], cached=[(request, None, 1)], scheduled={"r": 1}, tables={"r": ([1],)}
        )
        parts = [output.scheduled_new_reqs[0], output.scheduled_cached_reqs, output.kv_connector_block_state]
        blocks = make.blocks(([1],))
        return [request, feature, feature.mm_position, make.lora("a", 1, "/a"), output, *parts, blocks]

    for ours, theirs in zip(made(Maker("stand-in")), made(Maker("vllm")), strict=True):
        names = {name for name in dir(ours) if not name.startswith("__")}
        assert names <= set(dir(theirs)), type(theirs)


def known(request: Any, **more: Any) -> RequestIdentity:
    found = identify(request, SPACE, AdapterNames(), **more)
    assert isinstance(found, RequestIdentity), found
    return found


def keys(request: Any, **more: Any) -> list[ChunkKey]:
    found = known(request, **more)
    return chunk_keys(found.namespace, list(request.all_token_ids), extra_keys=found.extra_keys)


def test_a_plain_request_has_the_engines_namespace_and_no_extra_keys(make: Maker) -> None:
    assert known(make.request("r", [1, 2, 3])) == RequestIdentity(SPACE, ())


def with_image(make: Maker, name: str, offset: int = 20, length: int = 8, **more: Any) -> Any:
    return make.request("r", [7] * 64, mm_features=[make.feature(name, offset, length, **more)])


def test_two_images_with_the_same_placeholders_differ_from_the_chunk_that_they_touch(make: Maker) -> None:
    cat, dog, plain = (keys(r) for r in (with_image(make, CAT), with_image(make, DOG), make.request("r", [7] * 64)))
    assert cat[0] == dog[0] == plain[0]
    assert all(len({a, b, c}) == 3 for a, b, c in zip(cat[1:], dog[1:], plain[1:], strict=True))


def test_the_same_image_at_another_offset_or_of_another_length_differs(make: Maker) -> None:
    first = keys(with_image(make, CAT))
    for other in (keys(with_image(make, CAT, offset=21)), keys(with_image(make, CAT, length=9))):
        assert first[0] == other[0]
        assert first[1] != other[1]


def test_kind_and_mask_of_an_item_count(make: Maker) -> None:
    masks = [None, [True] * 8, [True] * 7 + [False], [False] + [True] * 7]
    found = {keys(with_image(make, CAT, mask=mask))[1] for mask in masks}
    found.add(keys(with_image(make, CAT, modality="video"))[1])
    assert len(found) == 5


def test_golden_extra_keys_of_an_image(make: Maker) -> None:
    (extra,) = known(with_image(make, CAT)).extra_keys
    assert (extra.start, extra.stop) == (20, 28)
    assert extra.content.hex() == "e7d58bac68ce030576fd3ca422e327c1a3b01b1245e49f6e9967adde61037663"
    digest = keys(with_image(make, CAT))[1].digest
    assert digest.hex() == "f469c0476ab0484540450494c6b51394aef55620fade43c8d459245648f4fe52"


@pytest.mark.parametrize("name", ["holiday.jpg", "request-7-image-0", "abc123", ""])
def test_an_item_that_its_sender_named_is_not_cached(make: Maker, name: str) -> None:
    found = identify(with_image(make, name), SPACE, AdapterNames())
    assert isinstance(found, Uncacheable)
    assert (found.reason, "token 20" in found.detail) == ("media", True)


def test_senders_names_may_be_trusted(make: Maker) -> None:
    one, two = (keys(with_image(make, name), trust_media_ids=True) for name in ("one", "two"))
    assert one[1] != two[1]


def test_the_adapters_name_before_a_hash_is_part_of_it(make: Maker) -> None:
    assert keys(with_image(make, f"lora:{CAT}"))[1] != keys(with_image(make, CAT))[1]


def test_salts_separate_tenants(make: Maker) -> None:
    a, b, none = (keys(make.request("r", [1] * 32, cache_salt=salt)) for salt in ("a", "b", None))
    assert len({a[0], b[0], none[0]}) == 3
    assert a[0].tenant == "0:a"


def test_a_salt_that_is_no_text_is_not_cached(make: Maker) -> None:
    found = identify(make.request("r", [1], cache_salt="\ud800"), SPACE, AdapterNames())
    assert isinstance(found, Uncacheable)
    assert found.reason == "salt"


def tensor(make: Maker, array: np.ndarray[Any, Any]) -> Any:
    if not make.real:
        return array
    import torch

    return torch.from_numpy(array.copy())


def test_prompt_embeddings_share_their_common_prefix(make: Maker) -> None:
    rows = np.arange(40 * 4, dtype=np.float32).reshape(40, 4)
    other = rows.copy()
    other[33, 1] = -0.5

    def found(array: np.ndarray[Any, Any]) -> list[ChunkKey]:
        request = make.request("r", None, prompt_embeds=tensor(make, array))
        for token in range(8):
            request.append_output_token_ids(token)
        return keys(request)

    first, second = found(rows), found(other)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert first[0] != keys(make.request("r", [0] * 48))[0], "placeholders are not token 0"
    assert first[0] != found(rows.astype(np.float16))[0]
    assert first[0] != found(rows.view(np.int32).reshape(40, 4))[0], "the same bytes of another type"


def test_of_a_mixed_prompt_it_counts_which_tokens_are_embeddings(make: Maker) -> None:
    rows = np.ones((16, 4), dtype=np.float32)

    def found(mask: list[bool]) -> ChunkKey:
        embeds = tensor(make, rows)
        return keys(make.request("r", [0] * 16, prompt_embeds=embeds, prompt_is_token_ids=mask))[0]

    assert found([True] + [False] * 15) != found([False] * 15 + [True])


def test_embeddings_without_a_row_for_each_token_are_not_cached(make: Maker) -> None:
    request = make.request("r", [1] * 8, prompt_embeds=tensor(make, np.ones((8, 4, 4), dtype=np.float32)))
    found = identify(request, SPACE, AdapterNames())
    assert isinstance(found, Uncacheable)
    assert found.reason == "embeddings"


def adapter(folder: Path, value: int, rank: int = 8) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    data = bytes([value]) * 64
    header = json.dumps({"a": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    return folder


def test_an_adapter_is_its_name_and_its_content_not_its_number_or_its_folder(make: Maker, tmp_path: Path) -> None:
    def space(name: str, number: int, path: Path) -> Namespace:
        return known(make.request("r", [1], lora_request=make.lora(name, number, path))).namespace

    one = adapter(tmp_path / "one", 1)
    base = space("sql", 1, one)
    assert base.adapter.startswith("sql@sampled:")
    assert base != SPACE
    assert base == space("sql", 2, one)
    assert base == space("sql", 1, adapter(tmp_path / "renamed", 1))
    assert len({base, space("chat", 1, one), space("sql", 1, adapter(tmp_path / "two", 2))}) == 3
    assert base != space("sql", 1, adapter(tmp_path / "scaled", 1, rank=16))


def test_the_folder_of_an_adapter_may_be_said_as_the_engine_takes_it(
    make: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    place = adapter(tmp_path / "one", 1)
    spaces = [known(make.request("r", [1], lora_request=make.lora("a", 1, p))).namespace for p in ("~/one", place)]
    assert spaces[0] == spaces[1]


def test_an_adapter_of_the_hub_is_named_by_its_commit(make: Maker, tmp_path: Path) -> None:
    place = adapter(tmp_path / "models--a--b" / "snapshots" / ("1f" * 20), 1)
    found = known(make.request("r", [1], lora_request=make.lora("sql", 1, place)))
    assert found.namespace.adapter == f"sql@commit:{'1f' * 20}"


def test_an_adapter_that_cannot_be_read_or_has_changed_is_not_cached(make: Maker, tmp_path: Path) -> None:
    names = AdapterNames()
    gone = make.request("r", [1], lora_request=make.lora("sql", 1, tmp_path / "nothing"))
    found = identify(gone, SPACE, names)
    assert isinstance(found, Uncacheable)
    assert (found.reason, "is not in a folder of this machine" in found.detail) == ("adapter", True)
    place = adapter(tmp_path / "one", 1)
    request = make.request("r", [1], lora_request=make.lora("sql", 1, place))
    assert isinstance(identify(request, SPACE, names), RequestIdentity)
    adapter(place, 2, rank=123)
    found = identify(request, SPACE, names)
    assert isinstance(found, Uncacheable)
    assert "have changed" in found.detail
