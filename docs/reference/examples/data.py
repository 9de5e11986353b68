from pathlib import Path
import torch
from clearhead import data
from clearhead.data import Batches, CharTokenizer, FixedSize, SortDedup, WordLevelTokenizer, TokenBudget
book = Path("book.txt")
size = book.write_text("To be, or not to be, that is the question.\n" * 40)
pairs = Path("pairs.tsv")
size = pairs.write_text("\n".join(f"I have {i} cats.\tTengo {i} gatos." for i in range(400)))


task = SortDedup(n_train=64, n_validation=16)  # a Task, whose parts are Split
batch = next(iter(Batches(task.train, FixedSize(8))))  # a Batch, here a TokenBatch
batch.labels.shape[0]  # → 8

next(iter(Batches(SortDedup(n_train=64, n_validation=16).train, TokenBudget(100)))).n_tokens <= 100  # → True

tokenizer = data.train_bpe(book, 300)  # a ByteLevelBPE, which is a Tokenizer
tokenizer.decode(tokenizer.encode("To be"))  # → 'To be'

CharTokenizer("abc").encode("cab")

WordLevelTokenizer(["<pad>", "<bos>", "<eos>", "A", "B"]).vocab_size  # → 5

folder = data.train_bpe(book, 300).save("tokenizer").parent
tokenizer = data.load_tokenizer(folder)
shards = data.tokenize([book], tokenizer, "shards", processes=1)  # a Shards, whose parts a ShardSplit reads
len(shards) > 0  # → True

text, report = data.read_text(book)  # a RowReport says what was left out
ids = torch.tensor(CharTokenizer(set(text)).encode(text))
windows = data.WindowSplit(ids, context=16, windows=data.ConsecutiveWindows())
(data.RandomWindows(), data.LanguageModeling, data.ShardSplit)

corpus = data.read_pairs(pairs)
ragged = data.encode_sources(data.train_bpe(book, 300), ["To be"])  # a Ragged
targets = data.encode_targets(data.train_bpe(book, 300), ["or not"])

task = data.TranslationTask.load(pairs, vocab_size=300)  # parts are PairSplit, batches PairBatch or PackedPairBatch
batch = next(iter(Batches(task.train, data.SequencePacking(rows=2, width=64))))

pixels, labels = torch.zeros(4, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 2, 3])
images = data.Images(pixels, labels)
split = data.ImageSplit(images, data.ImageNormalize(), augment=[data.RandomShift(1), data.RandomAffine(), data.RandomContrast()])  # gives ImageBatch

data.prepare(torch.zeros(2, 8, 8, dtype=torch.uint8), data.DatasetNormalize(0.5, 0.2)).shape  # → torch.Size([2, 1, 8, 8])

data.normalization_from_dict(data.normalization_to_dict(data.ImageNormalize()))

data.get_dataset("en-es").license  # of a DatasetInfo, with its Download and DatasetFile

data.identify(book) is None  # → True

(data.fetch, data.fetch_file)  # need a network

(data.DigitClassification, data.load_images)  # read a folder of MNIST, Fashion-MNIST or SVHN

points = torch.utils.data.TensorDataset(torch.randn(20, 5), torch.randint(3, (20,)))
split = data.DatasetSplit(points)  # its batches are of class InputBatch
split.batch(torch.tensor([3, 7])).inputs.shape  # → torch.Size([2, 5])
task = data.DatasetTask(train=split, validation=split, name="points")
data.InputBatch.of(torch.randn(2, 5), torch.tensor([0, 2])).n_labels  # → 2

Batches(SortDedup(n_train=64, n_validation=16).train, FixedSize(8)).statistics()  # a BatchStatistics
