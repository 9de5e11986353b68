"""Invalid files raise one sentence with the line."""

from __future__ import annotations

import pytest

from clearhead.course.exercises import ProblemError, grade_file, solve, solve_text
from clearhead.errors import StorageError

pytestmark = pytest.mark.bad_input

GOOD = """kind = "attention"
tokens = ["a", "b"]
mask = "causal()"
temperature = 1
unembedding = "tied"

[embeddings]
a = [1, 0]
b = [0, 1]

[weights]
Q = [[1, 0], [0, 1]]
K = [
  [1, 2],
  [3, 4],
]
V = [[1, 0], [0, 1]]

[[loss]]
targets = { 1 = "b" }
"""


def test_valid_file_agrees_with_float64():
    assert solve_text(GOOD).agrees


CHANGES = [
    ('mask = "causal()"', 'mask = "casual()"', 3, "mask: "),
    ('mask = "causal()"', "mask = 3", 3, "expected text in quotes"),
    ("temperature = 1", "temperatur = 1", 4, "the key 'temperatur' is unknown here; did you mean 'temperature'"),
    ("temperature = 1", "temperature = -1", 4, "expected 0, a positive number"),
    ("temperature = 1", 'temperature = "warm"', 4, "'warm' is unknown"),
    ("temperature = 1", "temperature = 1 1", 4, "this is not TOML"),
    ('tokens = ["a", "b"]', 'tokens = ["a", "c"]', 2, "the token 'c' has no embedding; expected one of 'a', 'b'"),
    ('tokens = ["a", "b"]', "tokens = []", 2, "empty list"),
    ('tokens = ["a", "b"]', "tokens = [1]", 2, "a list of texts"),
    ("b = [0, 1]", "b = [0, 1, 2]", 9, "the embedding of 'b' has 3 numbers and that of 'a' has 2"),
    ("  [3, 4],", "  [3, 4, 5],", 15, "row 2 of K has 3 numbers and row 1 has 2"),
    ("  [3, 4],", "  [3, 'x'],", 15, "'x' is unknown"),
    ("  [3, 4],", "  [3, inf],", 15, "expected a finite number"),
    ("  [3, 4],", "  7,", 15, "row 2 of K is 7"),
    ("  [3, 4],", "  [3, 4], [5, 6],", 13, "W_K is 3×2 and X has width 2; give W_K 2 rows"),
    ("Q = [[1, 0], [0, 1]]", "Q = [[1], [0]]", 13, "W_Q is 2×1 and W_K is 2×2; give them the same number of columns"),
    ("Q = [[1, 0], [0, 1]]", "", 11, "the key 'Q' is missing"),
    ("Q = [[1, 0], [0, 1]]", "Q = []", 12, "an empty list; expected a matrix"),
    ("Q = [[1, 0], [0, 1]]", "Q = [[1, 0], [0, 1]]\nO = [[1, 2]]", 13, "W_O is 1×2 and Z has width 2"),
    ("Q = [[1, 0], [0, 1]]", "Q = [[1, 0], [0, 1]]\nX = [[1]]", 13, "the key 'X' is unknown"),
    ("V = [[1, 0], [0, 1]]", "V = [[1], [0]]", 5, "the unembedding is 2×2 and R has width 1"),
    ('unembedding = "tied"', 'unembedding = "loose"', 5, "may only be 'tied'"),
    ('unembedding = "tied"', "", 19, "a loss needs logits"),
    ('unembedding = "tied"', 'unembedding = "tied"\nheads = 3', 13, "3 heads; its columns must divide"),
    ('unembedding = "tied"', 'unembedding = "tied"\nx = [[1, 2]]', 6, "give one of them"),
    ('unembedding = "tied"', 'unembedding = "tied"\ngradient = ["W"]', 6, "gradient lists some of"),
    ('{ 1 = "b" }', '{ 3 = "b" }', 20, "position '3'; expected a number from 1 to 2"),
    ('{ 1 = "b" }', '{ 1 = "z" }', 20, "the target 'z' is not in the vocabulary"),
    ('kind = "attention"', 'kind = "attenton"', 1, "kind is 'attenton'; expected one of attention"),
    ('kind = "attention"', "", 1, "the key 'kind' is missing"),
    ("[weights]", '[[document]]\nstep = "z"\nsays = [[1], [2, 3]]\n[weights]', 13, "differ in length"),
    ("[weights]", '[[document]]\nstep = "zz"\nsays = 1\n[weights]', 12, "step is 'zz'; expected one of"),
]


@pytest.mark.parametrize(("old", "new", "line", "why"), CHANGES)
def test_invalid_attention_file_raises_with_line(old, new, line, why):
    assert old in GOOD
    with pytest.raises(ProblemError) as caught:
        solve_text(GOOD.replace(old, new, 1), "mine.toml")
    message = str(caught.value)
    assert message.startswith(f"mine.toml, line {line}: "), message
    assert why in message
    assert "\n" not in message


_CONV = 'kind = "convolution"\ninput = [1, 8, 8]\n[[layer]]\n'
INVALID_VALUES = [
    ('kind = "layer-norm"\nx = [2, 2]\n', 2, "all the same and eps is 0"),
    ('kind = "layer-norm"\nx = [2, 3]\ngamma = [1, 2, 3]\n', 3, "gamma has 3 numbers and x has 2"),
    ('kind = "layer-norm"\nx = 3\n', 2, "expected a list of numbers"),
    ('kind = "layer-norm"\nx = [1, 2]\neps = -1\n', 3, "eps is negative"),
    ('kind = "position"\nd_model = 7\npositions = [1]\npairs = [0]\n', 2, "expected an even number"),
    ('kind = "position"\nd_model = 8\npositions = [1]\npairs = [0,\n 4]\n', 5, "from 0 to 3"),
    ('kind = "schedule"\nlr_max = 1\nwarmup_steps = 9\ntotal_steps = 5\nsteps = [1]\n', 3, "from 1 to 4"),
    ('kind = "schedule"\nlr_max = 0\nwarmup_steps = 1\ntotal_steps = 5\nsteps = [1]\n', 2, "above 0"),
    ('kind = "mask"\nlength = 4\nexpression = "causal("\n', 3, "does not parse"),
    (
        'kind = "mask"\nlength = 4\nexpression = "full()"\nalso = [\n "causal()",\n "windw(1, 2)",\n]\n',
        6,
        "does not parse",
    ),
    ('kind = "mask"\nlength = 4000\nexpression = "full()"\n', 2, "from 1 to 64"),
    ('kind = "cost"\nd_model = 10\nheads = 3\n', 3, "share it evenly"),
    ('kind = "cost"\nd_model = 10\nbias = 1\n', 3, "true or false"),
    ('kind = "receptive-field"\nheads = [1, -2]\nlayers = 3\n', 2, "from 0 to 1,000"),
    ('kind = "convolution"\ninput = [1, 8]\n', 2, "three whole numbers"),
    ('kind = "convolution"\ninput = [1, 8, 8]\n', 1, "no [[layer]]"),
    (_CONV + 'type = "convolution"\nfilters = 1\nkernel = 9\n', 6, "make it shorter"),
    (_CONV + 'type = "flatten"\n[[layer]]\ntype = "max-pool"\nkernel = 1\nstride = 1\n', 5, "whose output is flat"),
    (_CONV + 'type = "linear"\noutputs = 1\n', 3, "put a flatten layer between"),
    (_CONV + 'type = "flatten"\n[[layer]]\ntype = "pool"\n', 6, "expected one of"),
    (_CONV + 'type = "max-pool"\nkernel = 2\nstride = 0\n', 6, "from 1"),
]


@pytest.mark.parametrize(("text", "line", "why"), INVALID_VALUES)
def test_invalid_file_of_other_type_raises_with_line(text, line, why):
    with pytest.raises(ProblemError) as caught:
        solve_text(text)
    assert caught.value.line == line, str(caught.value)
    assert why in str(caught.value)


def test_missing_or_binary_files_raise(tmp_path):
    with pytest.raises(StorageError, match="no file and no bundled problem 'sort-dedupe'; expected one of"):
        solve("sort-dedupe")
    with pytest.raises(StorageError, match="cannot read"):
        solve(tmp_path / "none.toml")
    with pytest.raises(StorageError, match="no bundled problem"):
        solve("../problems/sort-dedup")
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StorageError, match="not UTF-8"):
        solve(tmp_path / "b.toml")


def test_file_with_bom_and_crlf_is_read(tmp_path):
    text = 'kind = "layer-norm"\nx = [1,\n  3]\n'
    (tmp_path / "w.toml").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert solve(tmp_path / "w.toml").steps == solve_text(text).steps
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbf" + b"z = [[-1, 1]]\r\n")
    assert grade_file(solve(tmp_path / "w.toml"), tmp_path / "a.toml").is_right


def test_solve_prefers_a_bundled_problem_to_a_folder_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sort-dedup").mkdir()
    assert solve("sort-dedup").agrees
