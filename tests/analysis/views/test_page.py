"""The data of a page equals the weights of the run; its size is bounded and it is self-contained."""

from __future__ import annotations

import base64
import html
import json
import re
import zlib
from html.parser import HTMLParser

import pytest
import torch

from clearhead.analysis.measures import rollout
from clearhead.analysis.tracing.trace import trace
from clearhead.analysis.views import attention_map as attention_map_module
from clearhead.analysis.views.attention_map import AttentionMap, AxisLayout
from clearhead.analysis.views.page import BUDGET, StoragePlan, make_packer, plan, quantize, render_page, save_page
from clearhead.analysis.views.report import AttentionReport, attention_maps, build_report
from clearhead.errors import ConfigError, ShapeError
from clearhead.generation import generate
from clearhead.masks import causal
from clearhead.models import Decoder, DecoderConfig, EncoderDecoder, tiny_encoder_decoder
from tests.support.attention_weights import softmax


def bytes_of(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(text))), dtype=torch.uint8)


def decoded(text: str, bits: int, *shape: int) -> torch.Tensor:
    """Decode weights like the script of the page: (code / maximum)²."""
    raw = bytes_of(text).to(torch.float64)
    codes = raw if bits == 8 else raw[0::2] + 256 * raw[1::2]
    return ((codes / ((1 << bits) - 1)) ** 2).view(*shape)


def data_of(text: str) -> dict:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(match.group(1))


def packed(attention_map: AttentionMap, storage: StoragePlan) -> dict:
    collector = make_packer(attention_map, storage)
    for rows in attention_map.row_blocks():
        collector.add(*rows)
    return collector.result()


def random_map(H=3, T=23, S=19, **more) -> AttentionMap:
    return AttentionMap.of(
        softmax(H, T, S, sharp=3.0),
        [f"q{i}" for i in range(T)],
        [f"k{j}" for j in range(S)],
        cross=True,
        **more,
    )


class TestPacking:
    @pytest.mark.parametrize("bits", [8, 16])
    def test_full_matrices_decode_within_half_a_step(self, bits):
        attention_map = random_map()
        stored = packed(attention_map, StoragePlan(bits=bits))["matrices"]
        everything = attention_map.all_heads().double()
        expected = torch.cat((everything, everything.mean(0, keepdim=True)))
        step = 1 / ((1 << bits) - 1)
        for text, weights in zip(stored, expected, strict=True):
            stored_weights = decoded(text, bits, 23, 19)
            assert ((stored_weights.sqrt() - weights.sqrt()).abs() <= step / 2 + 1e-7).all()

    @pytest.mark.parametrize("rows_at_once", [1, 5, 23])
    def test_tiled_matrices_equal_loops(self, monkeypatch, rows_at_once):
        """Compare with loops over the full matrices, for several sizes of row blocks."""
        monkeypatch.setattr(attention_map_module, "WEIGHTS_PER_BLOCK", 3 * 19 * rows_at_once)
        attention_map = random_map()
        stored = packed(attention_map, StoragePlan(bits=8, side=7, keys_per_row=4))
        everything = attention_map.all_heads()
        matrices = torch.cat((everything, everything.mean(0, keepdim=True)))
        tile_rows, tile_columns = 4, 3  # ⌈23 / 7⌉ and ⌈19 / 7⌉
        assert stored["tile"] == [tile_rows, tile_columns]
        assert stored["tiles"] == [6, 7]
        for h, weights in enumerate(matrices):
            tiles = [
                [weights[i : i + tile_rows, j : j + tile_columns] for j in range(0, 19, tile_columns)]
                for i in range(0, 23, tile_rows)
            ]
            largest = torch.tensor([[float(part.max()) for part in line] for line in tiles])
            mean = torch.tensor([[float(part.mean()) for part in line] for line in tiles])
            torch.testing.assert_close(bytes_of(stored["largest"][h]).view(6, 7), quantize(largest, 8))
            difference = bytes_of(stored["mean"][h]).view(6, 7).int() - quantize(mean, 8).int()
            assert difference.abs().max() <= 1  # a different order of summation may round to the next step
            keys = bytes_of(stored["keys"][h]).view(23, 4, 2).int()
            keys = keys[..., 0] + 256 * keys[..., 1]
            torch.testing.assert_close(keys, weights.topk(4).indices.int())
            torch.testing.assert_close(bytes_of(stored["weights"][h]).view(23, 4), quantize(weights.topk(4).values, 8))

    def test_plan_depends_on_size(self):
        def of(T: int, layers: int, H: int) -> StoragePlan:
            blank = AttentionMap.of(torch.zeros(H, 1, 1), ["x"])
            tokens = ("x",) * T
            big = AttentionMap(
                path="x", rows=tokens, columns=tokens, n_heads=H, compute_rows=blank.compute_rows, layout=blank.layout
            )
            return plan([big] * layers)

        assert of(12, 12, 8) == StoragePlan(bits=16)
        assert of(512, 4, 8) == StoragePlan(bits=8)
        for T, layers, H in ((2048, 6, 8), (4096, 12, 12), (16384, 2, 8)):
            storage = of(T, layers, H)
            assert storage.side is not None
            heads = layers * (H + 1)
            assert heads * (2 * storage.side**2 + 3 * T * storage.keys_per_row) <= BUDGET
            assert storage.side >= 64
            assert storage.keys_per_row >= 8


class TestPage:
    def test_page_data_equals_traced_run(self):
        config = DecoderConfig(vocab_size=31, d_model=24, n_heads=6, n_kv_heads=2, n_layers=2)
        model = Decoder(config).eval()
        ids = torch.randint(31, (3, 7), generator=torch.Generator().manual_seed(5))
        with torch.no_grad(), trace(model, "blocks.*.attention.weights", "blocks.*.output") as t:
            model(ids)
        tokens = [f"t{i}" for i in ids[1].tolist()]
        data = data_of(build_report(t, tokens, title="A run", metadata={"length": "7"}, batch=1).html())
        assert data["metadata"] == [["length", "7"]]
        for number, layer in enumerate(data["maps"]):
            path = f"blocks.{number}.attention"
            assert layer["path"] == path
            assert data["texts"][layer["rows"]] == tokens
            weights = t.weights(path)[1]
            for head in range(6):
                stored = decoded(layer["pack"]["matrices"][head], 16, 7, 7)
                torch.testing.assert_close(stored, weights[head].double(), atol=2e-5, rtol=0)
            projection = model.get_submodule(path).o_proj.weight.detach()
            values = t.values(path)[1].detach()
            by_hand = torch.tensor(
                [[float((projection[:, 4 * h : 4 * h + 4] @ values[h, j]).norm()) for j in range(7)] for h in range(6)]
            )
            value_norms = layer["value_norms"]["max"] * decoded(layer["value_norms"]["data"], 16, 6, 7)
            torch.testing.assert_close(value_norms, by_hand.double(), rtol=1e-3, atol=1e-3)
        norms = t.output("blocks.1")[1].norm(dim=-1)
        assert data["norms"][1]["values"] == pytest.approx(norms.tolist(), rel=1e-3)
        rolled = rollout([t.weights(path)[1] for path in t.paths])
        stored = decoded(data["rollouts"][0]["data"], 8, 7, 7)
        assert ((stored.sqrt() - rolled.double().sqrt()).abs() <= 0.5 / 255 + 1e-6).all()
        assert "differ from the outputs of the run" in data["footer"]

    def test_page_is_self_contained(self):
        text = render_page(AttentionReport(title="x", maps=[random_map()]))
        assert "default-src 'none'" in text
        addresses = set(re.findall(r"https?://[^\"'\s)]+", text))
        assert addresses == {"http://www.w3.org/2000/svg"}  # the SVG namespace, never fetched
        tags = []

        class PageParser(HTMLParser):
            def handle_starttag(self, tag, attrs):
                tags.append((tag, dict(attrs)))

        PageParser().feed(text)
        assert not any(name in attributes for _, attributes in tags for name in ("src", "srcset", "data"))
        assert not any(tag in ("link", "img", "iframe", "object") for tag, _ in tags)

    def test_page_escapes_tokens(self):
        nasty = ["</script><script>alert(1)</script>", "<!--", "&amp;", "\u2028", '"']
        text = render_page(AttentionReport(title="</title><b>", maps=[AttentionMap.of(softmax(1, 5, 5), nasty)]))
        assert data_of(text)["texts"] == [nasty]
        assert "</title><b>" not in text
        assert text.count("<script") == 2

    def test_page_keeps_texts_that_look_like_placeholders(self):
        nasty = ["{{title}}", "{{data}}", "{{script}}", r"\1 \g<0>"]
        text = render_page(AttentionReport(title="{{data}} {{style}}", maps=[AttentionMap.of(softmax(1, 4, 4), nasty)]))
        assert data_of(text)["texts"] == [nasty]
        assert "<title>{{data}} {{style}}</title>" in text

    def test_page_of_long_report_stays_within_budget(self, tmp_path):
        """The budget bounds the size of a page for any number of heads."""
        T = 4096
        keys = torch.arange(T)

        def block(start: int, stop: int) -> torch.Tensor:
            near = -(torch.arange(start, stop)[:, None] - keys).abs() / 64.0
            return torch.stack((near.softmax(-1), (near + torch.sin(keys * 1.0)).softmax(-1)))

        tokens = tuple(f"w{i}" for i in range(T))
        long = AttentionMap(
            path="x", rows=tokens, columns=tokens, n_heads=2, compute_rows=block, layout=AxisLayout(T, T)
        )
        path = save_page(AttentionReport(title="long", maps=[long]), tmp_path / "sub" / "long.html")
        assert path.stat().st_size < 30e6
        data = data_of(path.read_text(encoding="utf-8"))
        assert data["rollouts"] == []
        assert "Rollout is omitted above 1,024 tokens" in data["footer"]
        stored = data["maps"][0]["pack"]
        assert "matrices" not in stored
        assert stored["keys_per_row"] >= 64

    @pytest.mark.bad_input
    def test_invalid_reports_raise_config_error(self):
        with pytest.raises(ConfigError, match="at least one map"):
            AttentionReport(title="x", maps=[])
        tokens = ("x",) * 70_000
        attention_map = AttentionMap.of(torch.zeros(1, 1, 1), ["x"])
        long = AttentionMap(
            path="x",
            rows=tokens,
            columns=tokens,
            n_heads=1,
            compute_rows=attention_map.compute_rows,
            layout=attention_map.layout,
        )
        with pytest.raises(ConfigError, match="65,536 tokens but this run has 70,000"):
            render_page(AttentionReport(title="x", maps=[long]))


class TestAttentionMaps:
    def test_attention_maps_labels_match_patterns(self):
        model = EncoderDecoder(tiny_encoder_decoder()).eval()
        with torch.no_grad(), trace(model) as t:
            model(torch.randint(5, (2, 7)), torch.randint(5, (2, 3)))
        source, target = [f"s{i}" for i in range(7)], [f"t{i}" for i in range(3)]
        maps = {
            attention_map.path: attention_map
            for attention_map in attention_maps(
                t,
                {
                    "encoder.**": (source, source),
                    "**.cross_attention": (target, source),
                    "**": (target, target),
                },
            )
        }
        cross = maps["decoder.blocks.0.cross_attention"]
        assert (cross.kind, cross.rows, cross.columns) == ("cross", tuple(target), tuple(source))
        self_map = maps["decoder.blocks.0.attention"]
        assert (self_map.kind, self_map.rows) == ("self", tuple(target))
        torch.testing.assert_close(cross.weights(1), t.weights(cross.path)[0, 1])
        torch.testing.assert_close(cross.weights(), t.weights(cross.path)[0].mean(0))
        assert cross.difference <= cross.tolerance

    def test_attention_maps_without_labels_number_positions(self):
        model = Decoder(DecoderConfig(vocab_size=31, d_model=24, n_heads=6, n_layers=1)).eval()
        with torch.no_grad(), trace(model) as t:
            model(torch.randint(31, (1, 5)))
        (attention_map,) = attention_maps(t)
        assert attention_map.rows == attention_map.columns == ("0", "1", "2", "3", "4")
        assert attention_map.all_heads()[:, ~causal().dense(5)].abs().max() == 0

    def test_attention_maps_of_generation_equal_one_pass(self):
        """Stitched cached steps equal one pass over the final text."""
        model = Decoder(DecoderConfig(vocab_size=31, d_model=24, n_heads=6, n_layers=2)).eval()
        prompt = torch.tensor([[5, 3, 11]])
        with torch.no_grad(), trace(model) as steps:
            generated = generate(model, prompt, max_new_tokens=5)
        # The last token was generated but not encoded.
        ids = torch.cat((prompt, generated.best[0][None]), dim=1)[:, :-1]
        with torch.no_grad(), trace(model) as once:
            model(ids)
        names = [f"t{i}" for i in ids[0].tolist()]
        for attention_map, other in zip(attention_maps(steps, names), attention_maps(once, names), strict=True):
            torch.testing.assert_close(attention_map.all_heads(), other.all_heads(), atol=1e-5, rtol=1e-4)
            assert attention_map.kind == "self"

    def test_report_html_is_iframe_of_page(self):
        report = AttentionReport(title='a "run"', maps=[random_map()])
        iframe = report._repr_html_()
        match = re.fullmatch(r'<iframe srcdoc="([^"]*)" sandbox="allow-scripts" [^>]*></iframe>', iframe)
        assert html.unescape(match.group(1)) == report.html()

    @pytest.mark.bad_input
    def test_attention_maps_invalid_arguments_raise(self):
        model = Decoder(DecoderConfig(vocab_size=31, d_model=24, n_heads=6, n_layers=1)).eval()
        with torch.no_grad(), trace(model) as t:
            model(torch.randint(31, (1, 5)))
        with pytest.raises(ShapeError, match="5 queries and 5 keys, but the labels have 3 and 3"):
            attention_maps(t, ["a", "b", "c"])
        with pytest.raises(ShapeError, match="sequence 4 is out of range; the batch has 1"):
            attention_maps(t, batch=4)
