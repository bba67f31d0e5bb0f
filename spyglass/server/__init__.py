"""HTTP: three chat protocols over one engine. No tensors here."""
