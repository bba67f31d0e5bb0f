"""The seam between drivers (engine, trainer, plug-ins) and the model: data only, plus the pure function that builds it."""
