"""Image settings of the released models."""

from __future__ import annotations

from spyglass.config.presets import released_vision
from spyglass.families import V4, V41

V4_VISION, V41_VISION = released_vision(V4), released_vision(V41)
