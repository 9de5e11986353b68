"""Measures, head labels, rollout and contributions, compared with constructed weights and independent computations."""

from __future__ import annotations

import math

import pytest
import torch

from clearhead.analysis.measures import entropy, mean_attention_distance, rollout, value_norms, value_weighted_norms
from clearhead.analysis.views import attention_map as attention_map_module
from clearhead.analysis.views.attention_map import AttentionMap, AxisLayout, classify_head, is_punctuation
from clearhead.errors import ConfigError, ShapeError
from clearhead.masks import causal
from clearhead.nn import MultiHeadAttention
from tests.support.attention_weights import focused_weights, softmax


class TestMeasures:
    def test_entropy_of_n_equal_weights_is_log_n(self):
        weights = torch.zeros(3, 7)
        weights[0, 2] = 1.0
        weights[1, :5] = 1 / 5
        assert entropy(weights).tolist() == pytest.approx([0.0, math.log(5), 0.0])

    def test_mean_attention_distance_equals_loop(self):
        weights = softmax(2, 5, 7)
        by_hand = [[sum(weights[h, i, j].item() * abs(i - j) for j in range(7)) for i in range(5)] for h in range(2)]
        torch.testing.assert_close(mean_attention_distance(weights), torch.tensor(by_hand))

    def test_distance_on_a_grid_is_euclidean(self):
        apart = AxisLayout(7, 7, grid=(2, 3)).distances(0, 7)  # one token before the six patches
        assert apart[1, 6] == pytest.approx(math.sqrt(1 + 4))  # (0, 0) to (1, 2)
        assert apart[3, 4] == pytest.approx(math.sqrt(1 + 4))  # (0, 2) to (1, 0)
        assert apart[0].tolist() == [0.0] * 7

    def test_rollout_equals_sum_over_paths(self):
        """Sum over all paths from an input to an output: residual connection or attention at each layer."""
        layers = [softmax(3, 5, 5), softmax(2, 5, 5, sharp=2.0)]
        expected = torch.zeros(5, 5)
        for out in range(5):
            for middle in range(5):
                for source in range(5):
                    upper = 0.5 * (out == middle) + 0.5 * layers[1][:, out, middle].mean()
                    lower = 0.5 * (middle == source) + 0.5 * layers[0][:, middle, source].mean()
                    expected[out, source] += upper * lower
        torch.testing.assert_close(rollout(layers), expected)
        torch.testing.assert_close(rollout(layers).sum(-1), torch.ones(5))

    def test_rollout_keeps_empty_row_in_place(self):
        weights = softmax(2, 5, 5)
        weights[:, 3] = 0
        assert rollout([weights])[3].tolist() == [0, 0, 0, 1, 0]
        assert rollout([weights], residual=0.0)[3].tolist() == [0, 0, 0, 1, 0]

    @pytest.mark.parametrize("n_kv_heads", [6, 2])
    def test_value_weighted_norms_equal_output_contributions(self, n_kv_heads):
        layer = MultiHeadAttention(24, 6, n_kv_heads=n_kv_heads, bias=False).double()
        x = torch.randn(1, 7, 24, dtype=torch.float64)
        with torch.no_grad():
            q, k, v = (
                layer._split(p(x), n)[0]
                for p, n in ((layer.q_proj, 6), (layer.k_proj, n_kv_heads), (layer.v_proj, n_kv_heads))
            )
            group_size = 6 // n_kv_heads
            scores = q @ k.repeat_interleave(group_size, 0).mT / math.sqrt(4)
            weights = scores.masked_fill(~causal().dense(7), -torch.inf).softmax(-1)
            vectors = {
                (h, j): weights[h, 4, j] * (layer.o_proj.weight[:, 4 * h : 4 * h + 4] @ v[h // group_size, j])
                for h in range(6)
                for j in range(7)
            }
            torch.testing.assert_close(sum(vectors.values()), layer(x, mask=causal())[0, 4])
            contributions = value_weighted_norms(weights[:, 4], value_norms(v, layer.o_proj.weight), top=5)
        largest = sorted(vectors, key=lambda key: -float(vectors[key].norm()))[:5]
        assert [(contribution.head, contribution.key) for contribution in contributions] == largest
        total = sum(float(vector.norm()) for vector in vectors.values())
        for contribution in contributions:
            assert contribution.norm == pytest.approx(float(vectors[contribution.head, contribution.key].norm()))
            assert contribution.share == pytest.approx(contribution.norm / total)
            assert contribution.weight == pytest.approx(float(weights[contribution.head, 4, contribution.key]))

    @pytest.mark.bad_input
    def test_invalid_shapes_raise_shape_error(self):
        with pytest.raises(ShapeError, match="got no layer"):
            rollout([])
        with pytest.raises(ShapeError, match=r"layer 1 of the rollout is \(2, 3, 3\) and the first \(2, 5, 5\)"):
            rollout([softmax(2, 5, 5), softmax(2, 3, 3)])
        with pytest.raises(ShapeError, match="residual is 1"):
            rollout([softmax(2, 5, 5)], residual=1.0)
        with pytest.raises(ShapeError, match=r"expected both \(H, S\)"):
            value_weighted_norms(torch.ones(2, 3), torch.ones(3, 2))
        with pytest.raises(ShapeError, match="H a multiple of K"):
            value_norms(torch.ones(4, 5, 3), torch.ones(7, 18))


class TestLabels:
    T = 11

    @pytest.mark.parametrize(
        ("name", "keys"),
        [
            ("previous token", (torch.arange(11) - 1).clamp(min=0)),
            ("next token", (torch.arange(11) + 1).clamp(max=10)),
            ("diagonal", torch.arange(11)),
            ("first token", torch.zeros(11, dtype=torch.long)),
            ("last token", torch.full((11,), 10)),
        ],
    )
    def test_classify_head_names_pattern(self, name, keys):
        (label,) = classify_head(focused_weights(keys, self.T, self.T))
        assert label.name == name
        assert label.score == pytest.approx(0.9, abs=0.01)

    def test_classify_head_same_token_excludes_diagonal(self):
        tokens = list("abcabcabcab")
        keys = (torch.arange(self.T) + 3) % 9  # from 9 on, back to 3, 4
        (label,) = classify_head(focused_weights(keys, self.T, self.T), rows=tokens)
        assert label.name == "same token"
        assert label.score > 0.9
        (diagonal,) = classify_head(focused_weights(torch.arange(self.T), self.T, self.T), rows=tokens)
        assert diagonal.name == "diagonal"
        assert diagonal.scores["same token"] < 0.1

    def test_classify_head_same_token_ignores_unique_tokens(self):
        """Only queries whose token occurs more than once count."""
        (label,) = classify_head(focused_weights(torch.tensor([2, 0, 0, 0, 0]), 5, 5), rows=list("axayz"))
        assert label.scores["same token"] == pytest.approx(0.9, abs=0.01)
        (none,) = classify_head(focused_weights(torch.tensor([2, 0, 0, 0, 0]), 5, 5), rows=list("abcde"))
        assert "same token" not in none.scores

    def test_classify_head_punctuation_uses_rows_with_punctuation_keys(self):
        tokens = ["So", " be", " it", ",", "▁sir", "."]
        keys = torch.tensor([0, 0, 0, 3, 3, 5])
        weights = focused_weights(keys, 6, 6)[0].tril() + 1e-9 * torch.ones(6, 6).tril()
        (label,) = classify_head((weights / weights.sum(-1, keepdim=True))[None], rows=tokens)
        expected = [(weights[row, [3, 5]].sum() / weights[row].sum()).item() for row in (3, 4, 5)]
        assert label.name == "punctuation"
        assert label.scores["punctuation"] == pytest.approx(sum(expected) / 3, abs=1e-6)
        assert "punctuation" not in classify_head(weights[None], rows=list("abcdef"))[0].scores

    @pytest.mark.parametrize(
        ("token", "is_one"),
        [(",", True), (" ?!", True), ("▁—", True), ("¿", True), ("'s", False), ("␣", False), ("", False), ("$", False)],
    )
    def test_is_punctuation_accepts_marks_and_no_symbols(self, token, is_one):
        assert is_punctuation(token) == is_one

    def test_classify_head_single_token_is_mixed(self):
        (label,) = classify_head(torch.ones(1, 1, 1), rows=["a"])
        assert (label.name, label.score) == ("mixed", 0.0)

    def test_classify_head_broad_is_effective_share_of_keys(self):
        weights = torch.ones(self.T, self.T).tril()
        weights = (weights / weights.sum(-1, keepdim=True))[None]
        (label,) = classify_head(weights)
        assert label.name == "broad"
        assert label.score == pytest.approx(1.0)
        half = torch.zeros(1, 5, 8)
        half[..., :4] = 0.25 - 1e-4
        half[..., 4:] = 1e-4
        assert classify_head(half)[0].scores["broad"] == pytest.approx(0.5, abs=0.01)

    def test_classify_head_ignores_rows_with_one_key(self):
        """The first token attends only to itself, so its row counts for no pattern."""
        keys = (torch.arange(self.T) - 1).clamp(min=0)
        weights = torch.zeros(self.T, self.T)
        weights[torch.arange(self.T), keys] = 1.0
        weights[1:, :] = 0.9 * weights[1:] + 0.1 * torch.ones(self.T, self.T).tril()[1:] / torch.arange(2, 12)[:, None]
        (label,) = classify_head(weights[None])
        expected = sum(0.9 + 0.1 / n for n in range(2, 12)) / 10
        assert label.scores["previous token"] == pytest.approx(expected)

    def test_classify_head_without_pattern_is_mixed(self):
        weights = torch.full((1, self.T, self.T), 1e-5)
        weights[:, :, [2, 7]] = 0.3
        weights[:, :, 4] = 0.4
        assert classify_head(weights)[0].name == "mixed"

    def test_classify_head_broad_counts_keys_of_all_heads(self):
        hard = torch.zeros(self.T, self.T)
        hard[:, [2, 4, 7]] = 1 / 3
        alone, with_margin = (
            classify_head(hard[None])[0],
            classify_head(torch.stack((hard, softmax(self.T, self.T))))[0],
        )
        assert alone.scores["broad"] == pytest.approx(1.0)  # the other keys count as masked
        assert with_margin.scores["broad"] == pytest.approx(3 / self.T)

    def test_classify_head_cross_attention_diagonal(self):
        layout = AxisLayout(6, 11, cross=True)
        (label,) = classify_head(focused_weights(2 * torch.arange(6), 6, 11), layout=layout)
        assert label.name == "diagonal"
        assert "previous token" not in label.scores

    @pytest.mark.parametrize(
        ("offsets", "name"),
        [((-1,), "one before"), ((0,), "diagonal"), ((1,), "one after"), ((-1, 0, 1), "near diagonal")],
    )
    def test_classify_head_cross_attention_distinguishes_neighbors_of_diagonal(self, offsets, name):
        T, S = 17, 33  # query t is aligned with key 2t
        weights = torch.full((T, S), 1e-3)
        for offset in offsets:
            rows = torch.arange(T)[(2 * torch.arange(T) + offset >= 0) & (2 * torch.arange(T) + offset < S)]
            weights[rows, 2 * rows + offset] = 1.0
        weights = weights / weights.sum(-1, keepdim=True)
        (label,) = classify_head(weights[None], layout=AxisLayout(T, S, cross=True))
        assert label.name == name
        assert label.score > 0.9

    def test_classify_head_cross_attention_short_uniform_head_is_broad(self):
        """Of six keys, three are near the diagonal, so that their share is near one half by chance."""
        (label,) = classify_head(torch.full((1, 6, 6), 1 / 6), layout=AxisLayout(6, 6, cross=True))
        assert label.name == "broad"

    def test_classify_head_pattern_of_few_queries_is_not_the_label(self):
        """The period is visible to the last query only, which attends to it; the others attend to themselves."""
        tokens = ["<s>", "We", " are", " here", " now", "."]
        weights = focused_weights(torch.arange(6), 6, 6)[0].tril()
        (label,) = classify_head((weights / weights.sum(-1, keepdim=True))[None], rows=tokens)
        assert label.scores["punctuation"] > label.scores["broad"]
        assert label.name == "diagonal"

    def test_classify_head_image_patches(self):
        layout = AxisLayout(12, 12, grid=(3, 4))
        rows, columns = torch.arange(12) // 4, torch.arange(12) % 4
        along = (rows[:, None] == rows) & ~torch.eye(12, dtype=torch.bool)
        (label,) = classify_head((along / 3.0)[None], layout=layout)
        assert label.name == "same row"
        assert label.score == pytest.approx(1.0)
        near = ((rows[:, None] - rows).abs() + (columns[:, None] - columns).abs()) == 1
        (label,) = classify_head((near / near.sum(-1, keepdim=True))[None], layout=layout)
        assert label.name == "neighbors"

    @pytest.mark.bad_input
    def test_classify_head_invalid_labels_raise_shape_error(self):
        with pytest.raises(ShapeError, match="3 row and 3 column labels"):
            classify_head(softmax(2, 5, 5), rows=["a", "b", "c"])


class TestAttentionMap:
    def test_summary_of_row_blocks_equals_summary_of_all_rows(self, monkeypatch):
        """Sums over row blocks equal the computation over all rows."""
        tokens = [f"w{i % 5}" for i in range(23)]
        weights = softmax(3, 23, 23, sharp=3.0, mask=causal().dense(23))
        expected = AttentionMap.of(weights, tokens).summary
        monkeypatch.setattr(attention_map_module, "WEIGHTS_PER_BLOCK", 3 * 23 * 4)  # four rows at a time
        starts = []
        full = AttentionMap.of(weights, tokens)
        blocked = AttentionMap(
            path="x",
            rows=full.rows,
            columns=full.columns,
            n_heads=3,
            layout=full.layout,
            compute_rows=lambda start, stop: (starts.append((start, stop)), weights[:, start:stop])[1],
        )
        assert blocked.summary.entropy == pytest.approx(expected.entropy)
        assert blocked.summary.distance == pytest.approx(expected.distance)
        for label, expected_label in zip(blocked.summary.labels, expected.labels, strict=True):
            assert label.scores == pytest.approx(expected_label.scores)
        assert starts == [(i, min(i + 4, 23)) for i in range(0, 23, 4)]
        assert expected.entropy == pytest.approx(entropy(weights).mean(-1).tolist())

    def test_attention_map_names_follow_path(self):
        weights = softmax(1, 2, 2)
        for path, stack, layer, title in (
            ("encoder.blocks.3.attention", "encoder.blocks.*.attention", 3, "Encoder self-attention"),
            ("blocks.0.attention", "blocks.*.attention", 0, "Self-attention"),
            ("decoder.blocks.12.cross_attention", "decoder.blocks.*.cross_attention", 12, "Cross-attention"),
            ("transformer.h.4.attn", "transformer.h.*.attn", 4, "transformer.h.*.attn"),
            ("only", "only", 0, "only"),
        ):
            attention_map = AttentionMap.of(weights, ["a", "b"], path=path)
            assert (attention_map.stack, attention_map.layer, attention_map.title) == (stack, layer, title)

    @pytest.mark.bad_input
    def test_attention_map_invalid_arguments_raise(self):
        with pytest.raises(ShapeError, match=r"\(2, 3, 5\) and there are 3 row and 3 column"):
            AttentionMap.of(softmax(2, 3, 5), ["a", "b", "c"])
        with pytest.raises(ConfigError, match="has no head 2; expected 0 to 1"):
            AttentionMap.of(softmax(2, 3, 3), ["a", "b", "c"]).weights(2)
