"""Baselines to compare Transformers with: convolutional, recurrent, linear models and auto-encoders."""
