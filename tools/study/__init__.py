"""A study that needs a GPU: a vision Transformer compared with a convolutional network as the data grow.

    python -m tools.study --data svhn --out vit-against-cnn.json

The committed result is `clearhead/course/claims/results/vit-against-cnn.json`; claims about data and inductive bias are
evaluated with it. The command above, run in a checkout, reproduces it.
"""
