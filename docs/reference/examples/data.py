from pathlib import Path
import torch
from clearhead import data
from clearhead.data import Batches, ByCount, ByTokens, Characters, SortDedup, Symbols
book = Path("book.txt")
size = book.write_text("To be, or not to be, that is the question.\n" * 40)
pairs = Path("pairs.tsv")
size = pairs.write_text("\n".join(f"I have {i} cats.\tTengo {i} gatos." for i in range(400)))


task = SortDedup(n_train=64, n_validation=16)  # a Task, whose parts are Split
batch = next(iter(Batches(task.train, ByCount(8))))  # a Batch, here a TokenBatch
batch.labels.shape[0]  # → 8

next(iter(Batches(SortDedup(n_train=64, n_validation=16).train, ByTokens(100)))).n_tokens <= 100  # → True

tokenizer = data.train_bpe(book, 300)  # a BytePairs, which is a Tokenizer
tokenizer.decode(tokenizer.encode("To be"))  # → 'To be'

Characters("abc").encode("cab")

Symbols(["<pad>", "<bos>", "<eos>", "A", "B"]).vocab_size  # → 5

folder = data.train_bpe(book, 300).save("tokenizer").parent
tokenizer = data.load_tokenizer(folder)
shards = data.tokenize([book], tokenizer, "shards", processes=1)  # a Shards, whose parts a ShardSplit reads
len(shards) > 0  # → True

text, report = data.read_text(book)  # a Report says what was left out
ids = torch.tensor(Characters(set(text)).encode(text))
windows = data.WindowSplit(ids, context=16, windows=data.ConsecutiveWindows())
(data.RandomWindows(), data.Text, data.ShardSplit)

found = data.read_pairs(pairs)
ragged = data.encode_sources(data.train_bpe(book, 300), ["To be"])  # a Ragged
targets = data.encode_targets(data.train_bpe(book, 300), ["or not"])

task = data.Translation.load(pairs, vocab_size=300)  # parts are PairSplit, batches PairBatch or PackedPairBatch
batch = next(iter(Batches(task.train, data.Packed(rows=2, width=64))))

pixels, labels = torch.zeros(4, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 2, 3])
images = data.Images(pixels, labels)
split = data.ImageSplit(images, data.PerImage(), augment=[data.Shift(1), data.Affine(), data.Contrast()])  # gives ImageBatch

data.prepare(torch.zeros(2, 8, 8, dtype=torch.uint8), data.PerSet(0.5, 0.2)).shape  # → torch.Size([2, 1, 8, 8])

data.normalisation_from_dict(data.normalisation_to_dict(data.PerImage()))

data.find("en-es").licence  # of a DataSet, with its Remote and KnownFile

data.recognise(book) is None  # → True

(data.fetch, data.fetch_file)  # need a network

(data.Digits, data.load_images)  # read a folder of MNIST, Fashion-MNIST or SVHN

Batches(SortDedup(n_train=64, n_validation=16).train, ByCount(8)).statistics()  # a Statistics
