"""`KeyChain`: the keys of a sequence do not depend on the pieces it came in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcore.engine.keys import ExtraKey, KeyChain, Namespace, chunk_keys

NAMESPACE = Namespace("m", "1", chunk_tokens=4)
extras = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 9), st.binary(min_size=1, max_size=3)).map(
        lambda e: ExtraKey(e[0], e[0] + e[1], e[2])
    ),
    max_size=3,
)


@given(pieces=st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=9), max_size=6), extra=extras)
def test_pieces_make_the_keys_of_the_whole(pieces, extra):
    chain, tokens = KeyChain(NAMESPACE, extra_keys=extra), []
    for piece in pieces:
        tokens += piece
        assert chain.extend(piece) == chunk_keys(NAMESPACE, tokens, extra_keys=extra)
        assert chain.num_tokens == len(tokens)
        whole = chunk_keys(NAMESPACE, tokens, extra_keys=extra, partial=True)
        assert [*chain.keys, *filter(None, [chain.tail()])] == whole
        parents = [None, *(key.digest for key in whole[:-1])]
        assert [key.parent for key in whole] == parents[: len(whole)]


def test_a_request_brings_adapter_and_salt():
    base = Namespace("m", "1", salt="owner")
    assert base.for_request() is base
    mine = base.for_request(adapter="lora", salt="tenant")
    assert (mine.adapter, mine.salt) == ("lora", "5:ownertenant")
    digests = {
        one.digest
        for one in (
            base,
            mine,
            base.for_request(salt="tenant"),
            base.for_request(adapter="lora"),
            Namespace("m", "1").for_request(salt="tenant"),
            Namespace("m", "1", salt="tenant").for_request(salt="owner"),
        )
    }
    assert len(digests) == 6


@given(st.tuples(st.text("05:a", max_size=3), st.text("05:a", min_size=1, max_size=4)), st.data())
def test_no_tenant_can_be_another(first, data):
    second = data.draw(st.tuples(st.text("05:a", max_size=3), st.text("05:a", min_size=1, max_size=4)))
    salts = [Namespace("m", "1", salt=own).for_request(salt=given).salt for own, given in (first, second)]
    assert (salts[0] == salts[1]) == (first == second)
