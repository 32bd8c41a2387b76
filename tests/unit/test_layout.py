"""Layout strings: what parses, what it means, and what is said about what does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import Layout, LayoutError
from kvcore.layout import AXES


@pytest.mark.parametrize(
    ("text", "list_axes", "dims", "parts", "paged"),
    [
        ("L|KBNHD", "L", ("K", "B", "N", "H", "D"), ("K", "V"), True),
        ("L|BKHND", "L", ("B", "K", "H", "N", "D"), ("K", "V"), True),
        ("L|BHN(KD)", "L", ("B", "H", "N", "(KD)"), ("K", "V"), True),
        ("L|BNC", "L", ("B", "N", "C"), ("C",), True),
        ("L|(BN)1C", "L", ("(BN)", "1", "C"), ("C",), True),
        ("BLKNHD", "", ("B", "L", "K", "N", "H", "D"), ("K", "V"), True),
        ("KL|(BN)HD", "KL", ("(BN)", "H", "D"), ("K", "V"), True),
        ("LK|1HTD", "LK", ("1", "H", "T", "D"), ("K", "V"), False),
        ("LKTHD", "", ("L", "K", "T", "H", "D"), ("K", "V"), False),
        ("LTC", "", ("L", "T", "C"), ("C",), False),
        ("L|BH[K:DN,V:ND]", "L", ("B", "H", "["), ("K", "V"), True),
        ("L|KB[K:ND,V:NE]", "L", ("K", "B", "["), ("K", "V"), True),
        ("L|B[v:N128,s:N4]", "L", ("B", "["), ("v", "s"), True),
        ("L[K:THD,V:THE]", "", ("L", "["), ("K", "V"), False),
        ("L|B*", "L", ("B", "*"), ("page",), True),
        ("LT*", "", ("L", "T", "*"), ("page",), False),
        ("L|BNHD", "L", ("B", "N", "H", "D"), ("X",), True),
    ],
)
def test_what_a_string_means(text, list_axes, dims, parts, paged):
    layout = Layout(text)
    assert (layout.list_axes, layout.dims, layout.parts, layout.paged) == (list_axes, dims, parts, paged)
    assert layout.opaque == ("*" in text)
    assert str(layout) == layout.text == text


def test_regions_carry_their_own_axes():
    layout = Layout("L|BH[K:DN,V:ND]")
    assert [(r.label, r.axes, r.nbytes) for r in layout.regions] == [("K", "DN", None), ("V", "ND", None)]
    assert (layout.part_axes("K"), layout.part_axes("V")) == ("LBHDN", "LBHND")
    assert [r.nbytes for r in Layout("L|B[v:N128,s:N4]").regions] == [128, 4]


def test_declared_extents_are_printed_and_compared():
    layout = Layout("L|KBNHD", N=16, H=8)
    assert str(layout) == "L|KBNHD H=8 N=16"
    assert layout == Layout("L|KBNHD", H=8, N=16)
    assert layout != Layout("L|KBNHD", H=8, N=32)
    assert layout != Layout("L|BKNHD", H=8, N=16)
    assert len({layout, Layout("L|KBNHD", N=16, H=8)}) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no dims"),
        ("L|", "no dims"),
        ("L|KBNQD", r"unknown axis 'Q'; axes are L \(layer\), K \(K/V pair\), B \(block\)"),
        ("LKTHDD", r"axis D \(head dim\) is given twice"),
        ("L|LKBNHD", r"axis L \(layer\) is given twice"),
        ("LTH", "one axis must be the row's width .* got none"),
        ("LTDE", r"one axis must be the row's width .* got \['D', 'E'\]"),
        ("L|KBHD", "B .* and N .* come together"),
        ("L|KNHD", "B .* and N .* come together"),
        ("L|KBNTHD", "either paged .* or dense"),
        ("LKHD", "either paged .* or dense"),
        ("LTHC", "a packed row .* neither heads"),
        ("LKTC", "a packed row .* nor a K/V pair"),
        ("N|KBHD", "list levels before '|' are L and K, got 'N'"),
        ("(LK)|BNHD", "list levels before '|' are L and K"),
        ("|KBNHD", "list levels before '|' are L and K, got ''"),
        ("L|K|BNHD", "one '|' at most"),
        ("l|kbnhd", "list levels"),
        ("kbnhd", "cannot read 'kbnhd' at position 0"),
        ("L|KB NHD", "cannot read ' NHD' at position 4"),
        ("L|K(BNHD", "cannot read '\\(BNHD' at position 3"),
        ("L|K(B)NHD", r"\(B\) fuses nothing"),
        ("L|K(B1)NHD", r"\(B1\) fuses nothing"),
        ("L|B*N", "nothing comes after '\\*'"),
        ("L|B[K:ND,V:ND]H", "nothing comes after '\\['"),
        ("L|BN*", "opaque pages .* layers and blocks only"),
        ("K|B*", "opaque pages .* layers and blocks only"),
        ("L|B[K:ND,K:ND]", "region labels must differ, got K, K"),
        ("L|KB[a:ND,b:ND]", "regions under a K axis are K and V"),
        ("L|B[K:N,V:ND]", "width .* in region K, got none"),
        ("L|B[v:ND128]", "region v has a size in bytes and a width .*D"),
        ("L|B[v:N0]", "a region is LABEL:AXES or LABEL:AXES<bytes>"),
        ("L|B[ND,ND]", "a region is LABEL:AXES"),
        ("L|B[]", "a region is LABEL:AXES"),
        ("L|B[K:BND,V:ND]", r"axis B \(block\) is given twice in region K"),
        ("[K:BND,V:TD]", "some regions are paged .* and some dense"),
    ],
)
def test_what_describes_no_cache_is_refused(text, message):
    with pytest.raises(LayoutError, match=message) as caught:
        Layout(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "extents", "message"),
    [
        ("L|KBNHD", {"T": 3}, "extent T=3 is declared, but the layout has no axis T"),
        ("L|KBNHD", {"Z": 3}, "extent Z=3 is declared, but the layout has no axis Z"),
        ("L|KBNHD", {"N": 0}, "extent N=0 of the token within a block axis is not a positive integer"),
        ("L|KBNHD", {"H": -1}, "extent H=-1 of the KV head axis"),
        ("L|KBNHD", {"D": 64.0}, "extent D=64.0 of the head dim axis"),
        ("LKTHD", {"K": 3}, "the K axis is the pair K, V: its extent is 2, not 3"),
    ],
)
def test_extents_that_mean_nothing_are_refused(text, extents, message):
    with pytest.raises(LayoutError, match=message):
        Layout(text, **extents)


@given(st.text(alphabet="LKBNTHDEC|()[]:,*1x48", max_size=14))
def test_any_text_is_a_layout_or_a_layout_error_that_quotes_it(text):
    try:
        layout = Layout(text)
    except LayoutError as error:
        assert repr(text) in str(error)  # noqa: PT017 - either outcome is right, and each has its own check
        return
    for part in layout.parts:
        axes = layout.part_axes(part)
        assert len(set(axes)) == len(axes)
        assert set(axes) <= set(AXES)
        assert ("B" in axes) == layout.paged
        assert ("T" in axes) != layout.paged


def test_a_layout_cannot_be_changed():
    layout = Layout("LKTHD", D=64)
    with pytest.raises(AttributeError):
        layout.text = "LTHD"
