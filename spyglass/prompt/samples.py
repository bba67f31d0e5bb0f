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


def scale_samples(picture: Image.Image) -> Image.Image:
    """Map 16-bit grey to 8 bits, rounding to nearest: 0 -> 0, 32768 -> 128, 65535 -> 255. Other modes pass unchanged.

    A transparent sample value of the file's header becomes an alpha channel, as it could not be told apart afterwards.
    """
    if picture.mode not in _WIDE_MODES:
        return picture
    wide = np.clip(np.asarray(picture if picture.mode == "I" else picture.convert("I")), 0, _HIGHEST)
    grey = Image.fromarray(((wide + _STEP // 2) // _STEP).astype(np.uint8))
    hidden = picture.info.get("transparency")
    if not isinstance(hidden, int):
        return grey
    grey.putalpha(Image.fromarray(np.where(wide == hidden, 0, 255).astype(np.uint8)))
    return grey


def flatten_on_white(picture: Image.Image) -> Image.Image:
    """Put a picture with transparency on white; pictures without pass unchanged."""
    if picture.mode not in _WITH_ALPHA and "transparency" not in picture.info:
        return picture
    straight = picture.convert(_PREMULTIPLIED.get(picture.mode, picture.mode))
    white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
    white.alpha_composite(straight.convert("RGBA"))
    return white.convert("RGB")


def drop_transparency_note(picture: Image.Image) -> Image.Image:
    """The same pixels in a mode that converts to RGB, without a header's transparency, of which Pillow would warn."""
    if picture.mode in _PREMULTIPLIED:
        return picture.convert(_PREMULTIPLIED[picture.mode])
    if isinstance(picture.info.get("transparency"), bytes):
        picture = picture.copy()
        del picture.info["transparency"]
    return picture


def refuse_non_finite(picture: Image.Image, name: str) -> None:
    """Refuse a float picture with NaN or infinite samples, whose conversion to 8 bits would be arbitrary.

    Raises:
        PromptError: with the first such pixel.
    """
    finite = np.isfinite(np.asarray(picture))
    if not finite.all():
        y, x = np.argwhere(~finite)[0]
        raise PromptError(f"{name} has a sample that is not a finite number at ({x}, {y})")
