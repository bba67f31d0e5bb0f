"""The seam between drivers (engine, trainer, plug-ins) and the model: data, and the function that builds it."""
