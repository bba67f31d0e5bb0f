"""Pixels of unusual modes, before `convert("RGB")`: 16-bit samples, transparency, floats.

Mode "I" is how Pillow hands over 16-bit samples of some formats and is read as 0..65535; mode "F" declares no range,
so only the reference's clipping to 0..255 is possible.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from spyglass.errors import PromptError

_WIDE_MODES = ("I;16", "I;16L", "I;16B", "I;16N", "I")
_PREMULTIPLIED = {"La": "LA", "RGBa": "RGBA"}
_WITH_ALPHA = ("LA", "PA", "RGBA", "La", "RGBa")
_HIGHEST = 65_535
_STEP = 257  # 65535 / 255


def scale_samples(image: Image.Image) -> Image.Image:
    """Map 16-bit grey to 8 bits, rounding to nearest: 0 -> 0, 32768 -> 128, 65535 -> 255. Other modes pass unchanged.

    A transparent sample value of the file's header becomes an alpha channel, as it could not be told apart afterwards.
    """
    if image.mode not in _WIDE_MODES:
        return image
    wide = np.clip(np.asarray(image if image.mode == "I" else image.convert("I")), 0, _HIGHEST)
    grey = Image.fromarray(((wide + _STEP // 2) // _STEP).astype(np.uint8))
    hidden = image.info.get("transparency")
    if not isinstance(hidden, int):
        return grey
    grey.putalpha(Image.fromarray(np.where(wide == hidden, 0, 255).astype(np.uint8)))
    return grey


def flatten_on_white(image: Image.Image) -> Image.Image:
    """Put an image with transparency on white; images without pass unchanged."""
    if image.mode not in _WITH_ALPHA and "transparency" not in image.info:
        return image
    straight = image.convert(_PREMULTIPLIED.get(image.mode, image.mode))
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    white.alpha_composite(straight.convert("RGBA"))
    return white.convert("RGB")


def drop_transparency_note(image: Image.Image) -> Image.Image:
    """The same pixels in a mode that converts to RGB, without a header's transparency, of which Pillow would warn."""
    if image.mode in _PREMULTIPLIED:
        return image.convert(_PREMULTIPLIED[image.mode])
    if isinstance(image.info.get("transparency"), bytes):
        image = image.copy()
        del image.info["transparency"]
    return image


def refuse_non_finite(image: Image.Image, name: str) -> None:
    """Refuse a float image with NaN or infinite samples, whose conversion to 8 bits would be arbitrary.

    Raises:
        PromptError: with the first such pixel.
    """
    finite = np.isfinite(np.asarray(image))
    if not finite.all():
        y, x = np.argwhere(~finite)[0]
        raise PromptError(f"{name} has a sample that is not a finite number at ({x}, {y})")
