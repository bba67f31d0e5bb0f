"""The few modules both towers share: linear maps over packed weights, norms, rotary tables, plain tensors."""
