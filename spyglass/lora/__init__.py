"""Adapters: PEFT folders in and out, banks on the device, merging. Knows linear maps, not models."""
