"""A study that needs a GPU: a vision Transformer against a convolutional network as the data grow.

    python -m tools.study --data svhn --out vit-against-cnn.json

The committed outcome is `clearhead/claims/results/vit-against-cnn.json`; the claims about data and inductive bias are
judged from it (`clearhead/claims/data_efficiency.py`), and the command above, in a checkout, makes it again.
"""
