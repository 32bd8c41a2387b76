"""What a codec costs a model: how small the KV gets, and how far the model's predictions move. See docs/evaluate.md."""
