"""What a model is made of, said once: names, shapes, formats, splits, LoRA targets. Torch-free."""
