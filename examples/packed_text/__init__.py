"""The parts of examples/train_packed_text.py: data, model, training, checkpoints, pictures."""
