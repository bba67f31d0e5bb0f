"""The protocols: how a body becomes a call, and what its answer looks like. Nothing here knows connections."""
