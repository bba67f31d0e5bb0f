"""From whatever holds an image (bytes, a path, a data URL, a PIL image) to RGB pixels, by stated rules.

`open_image` reads only the header and refuses what is too large, so nothing is unpacked before its size is known;
`to_rgb` unpacks. The default rules are the reference's: `convert("RGB")` and nothing else (docs/formats.md,
"Images").
"""

from __future__ import annotations

import io
import os
import stat
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import ExifTags, Image, TiffImagePlugin, UnidentifiedImageError

from spyglass.errors import PromptError
from spyglass.prompt.data_url import decode_data_url, is_data_url
from spyglass.prompt.png import SIGNATURE, sound_png
from spyglass.prompt.samples import drop_transparency_note, flatten_on_white, refuse_non_finite, scale_samples

ImageInput = bytes | bytearray | memoryview | str | os.PathLike[str] | Image.Image

# What Pillow's decoders raise on damaged or hostile files. Nearly everything, which is why it is a list: a new kind
# must be seen.
DECODER_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    EOFError,
    Image.DecompressionBombError,
    LookupError,
    MemoryError,
    NotImplementedError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    Warning,  # where warnings are made errors
    struct.error,
    zlib.error,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRules:
    """Where the reference and people's wishes part.

    `exif`: "stored" leaves pixels as the file has them, "upright" applies the orientation tag. `alpha`: "drop" shows
    whatever colour hides under transparent pixels, "white" puts the image on white. `samples`: "clip" cuts 16-bit
    samples at 255, "scale" maps 0..65535 to 0..255.
    """

    exif: Literal["stored", "upright"] = "stored"
    alpha: Literal["drop", "white"] = "drop"
    samples: Literal["clip", "scale"] = "clip"


REFERENCE_RULES = ImageRules()
CHAT_RULES = ImageRules(exif="upright", samples="scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """How large images may be. The defaults are a published public contract, meant for servers.

    `file_bytes` and `total_bytes` count encoded files, one and all of a prompt; `side` pixels, `crowded_side` from
    `crowd` images on; `pixels` and `total_pixels` count decoded pixels, one and all of a prompt; `url_chars` bounds a
    remote address.
    """

    file_bytes: int = 32 << 20
    total_bytes: int = 64 << 20
    side: int = 8192
    crowd: int = 15
    crowded_side: int = 4096
    images: int = 600
    pixels: int = 8192 * 8192
    total_pixels: int = 256_000_000
    url_chars: int = 8192


# For one's own images in Python: only what cannot be meant is refused. Pillow itself stops at 178,956,970 pixels.
PYTHON_LIMITS = ImageLimits(
    file_bytes=1 << 30,
    total_bytes=8 << 30,
    side=65_535,
    crowded_side=65_535,
    images=10_000,
    pixels=178_956_970,
    total_pixels=1 << 36,
)
_SCAN = b"\xff\xda"  # in the data of a scan no 0xff is followed by anything but zero or a restart
_MAX_SCANNED, _FEW_SCANS = 1_000_000_000, 12  # scans times pixels; what encoders write
_ROWS_PER_STRIP, _TILE_WIDTH, _TILE_LENGTH, _ALL_ROWS = 278, 322, 323, 0xFFFFFFFF
_MAX_PART = 1 << 22  # pixels of a tile or strip, whatever the image has
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")

_ORIENTATIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)


def read_source(
    source: ImageInput, *, limits: ImageLimits = PYTHON_LIMITS, name: str = "the image"
) -> bytes | Image.Image:
    """The encoded bytes behind `source`, or the PIL image that it is. A str is a data URL or a path.

    Raises:
        PromptError: unknown kind, unreadable or empty file, more than `limits.file_bytes`, a remote address.
    """
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, str) and is_data_url(source):
        data = decode_data_url(source, most_bytes=limits.file_bytes, name=name)
    elif isinstance(source, str) and source[:8].lower().startswith(("http://", "https://")):
        raise PromptError(f"{name} is a remote address; images are not fetched here, pass its bytes or a data URL")
    elif isinstance(source, str | os.PathLike):
        data = _read_file(source, limits, name)
    elif isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
    else:
        raise PromptError(f"{name} is a {type(source).__name__}; an image is bytes, a path, a data URL or a PIL image")
    if not data:
        raise PromptError(f"{name} is empty")
    if len(data) > limits.file_bytes:
        raise PromptError(f"{name} has {len(data)} bytes, the limit is {limits.file_bytes}; send a smaller file")
    return data


def open_image(source: ImageInput, *, limits: ImageLimits = PYTHON_LIMITS, name: str = "the image") -> Image.Image:
    """Open an image without unpacking it: its `size` is known and within `limits`, its pixels are not yet read.

    Animations stand at their first frame. A PIL image is taken at the frame it stands at.

    Raises:
        PromptError: not one of `FORMATS`, damaged header, a wrong checksum (PNG), a side or pixel count over the
            limits; errors begin with `name`.
    """
    data = read_source(source, limits=limits, name=name)
    if isinstance(data, Image.Image):
        image = data
    else:
        if data.startswith(SIGNATURE):
            data = sound_png(data, name)
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        except UnidentifiedImageError:
            raise PromptError(
                f"{name} is none of {', '.join(FORMATS)} (or its header is damaged): it begins with {data[:12]!r}"
            ) from None
        except DECODER_FAULTS as error:
            raise PromptError(f"{name} cannot be opened: {_reason(error)}") from error
    width, height = image.size
    if width < 1 or height < 1:
        raise PromptError(f"{name} has no pixels ({width}x{height})")
    if max(width, height) > limits.side:
        raise PromptError(f"{name} is {width}x{height}, a side may have {limits.side} pixels; scale it down")
    if width * height > limits.pixels:
        raise PromptError(f"{name} has {width * height} pixels, the limit is {limits.pixels}; scale it down")
    if isinstance(data, bytes):
        _refuse_costly(data, image, name)
    return image


def _refuse_costly(data: bytes, image: Image.Image, name: str) -> None:
    """Raises PromptError: a small file that takes long to unpack, or much memory."""
    pixels = image.width * image.height
    if image.format == "JPEG" and (scans := data.count(_SCAN)) * pixels > _MAX_SCANNED and scans > _FEW_SCANS:
        raise PromptError(f"{name} is a JPEG of {scans} scans, too many for its size; save it with fewer")
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        tags = image.tag_v2
        rows = tags.get(_ROWS_PER_STRIP, 1)
        strip = image.width * (rows if isinstance(rows, int) and rows != _ALL_ROWS else 1)
        tile = [size if isinstance(size, int) else 1 for size in (tags.get(_TILE_WIDTH, 1), tags.get(_TILE_LENGTH, 1))]
        if max(strip, tile[0] * tile[1]) > max(pixels, _MAX_PART):
            raise PromptError(f"{name} is a TIFF with a tile or strip far larger than itself; save it anew")


def oriented_size(image: Image.Image, rules: ImageRules = REFERENCE_RULES) -> tuple[int, int]:
    """(width, height) that `to_rgb` will give, from the header alone."""
    width, height = image.size
    return (height, width) if _orientation(image, rules) in _SIDEWAYS else (width, height)


def to_rgb(image: Image.Image, rules: ImageRules = REFERENCE_RULES, *, name: str = "the image") -> Image.Image:
    """Unpack an image and make it RGB by `rules`. The input is left as it was; an RGB input may be returned itself.

    Raises:
        PromptError: damaged or truncated data, a mode without a way to RGB, NaN or infinite samples.
    """
    try:
        image.load()
        orientation = _orientation(image, rules)
        if image.mode == "F":
            refuse_non_finite(image, name)
        if rules.samples == "scale":
            image = scale_samples(image)
        if rules.alpha == "white":
            image = flatten_on_white(image)
        if image.mode != "RGB":
            image = drop_transparency_note(image).convert("RGB")
        turn = _ORIENTATIONS.get(orientation)
        return image if turn is None else image.transpose(turn)
    except DECODER_FAULTS as error:
        raise PromptError(f"{name} cannot be decoded: {_reason(error)}") from error


def _orientation(image: Image.Image, rules: ImageRules) -> int:
    """EXIF orientation to undo, 1 = none. Pillow turns TIFF images upright by itself, under either rule."""
    if rules.exif == "stored" or image.format == "TIFF":
        return 1
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except DECODER_FAULTS:  # unreadable EXIF says nothing about orientation
        return 1
    return value if isinstance(value, int) else 1


def _read_file(path: str | os.PathLike[str], limits: ImageLimits, name: str) -> bytes:
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise PromptError(f"{_with_path(name, path)} is not a file")
        if status.st_size > limits.file_bytes:
            raise PromptError(
                f"{name} has {status.st_size} bytes, the limit is {limits.file_bytes}; send a smaller file"
            )
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or _reason(error)
        if os.fspath(path)[:7].lower().startswith(("http:/", "https:/")):  # of the two slashes a Path keeps one
            reason = "it is an address, and images are not fetched; save it and name the file"
        raise PromptError(f"{_with_path(name, path)} cannot be read: {reason}") from error


def _with_path(name: str, path: str | os.PathLike[str]) -> str:
    """`name`, and the path if the name does not tell it."""
    text = os.fspath(path)
    return name if name.endswith((text, f"{text})")) or text.endswith(name) else f"{name}: {text}"


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
