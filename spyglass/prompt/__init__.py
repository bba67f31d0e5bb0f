"""Text and images to ids and patches, without torch: usable in a front end, and fuzzed as one."""

from spyglass.prompt.build import IMAGE_POSITION, Part, build_prompt, prompt_from_parts
from spyglass.prompt.chat import ChatOptions, ImageRef, RenderedChat, encode_chat, render_chat
from spyglass.prompt.decode import (
    CHAT_RULES,
    PYTHON_LIMITS,
    REFERENCE_RULES,
    ImageLimits,
    ImageRules,
    open_image,
    oriented_size,
    to_rgb,
)
from spyglass.prompt.image import cut, normalisation_table, normalise, patchify, resize
from spyglass.prompt.placeholder import resolve_placeholder
from spyglass.prompt.plan import contained_size, layout_block, plan_image, plan_patches
from spyglass.prompt.tokenizer import PromptTokenizer, load_tokenizer
from spyglass.prompt.tokens import ImagePlan, ImageSpan, Patches, Prompt, TokenKind, prompt_digest
from spyglass.prompt.visibility import legal_cuts, visible_extra, window_range

__all__ = [
    "CHAT_RULES",
    "IMAGE_POSITION",
    "PYTHON_LIMITS",
    "REFERENCE_RULES",
    "ChatOptions",
    "ImageLimits",
    "ImagePlan",
    "ImageRef",
    "ImageRules",
    "ImageSpan",
    "Part",
    "Patches",
    "Prompt",
    "PromptTokenizer",
    "RenderedChat",
    "TokenKind",
    "build_prompt",
    "contained_size",
    "cut",
    "encode_chat",
    "layout_block",
    "legal_cuts",
    "load_tokenizer",
    "normalisation_table",
    "normalise",
    "open_image",
    "oriented_size",
    "patchify",
    "plan_image",
    "plan_patches",
    "prompt_digest",
    "prompt_from_parts",
    "render_chat",
    "resize",
    "resolve_placeholder",
    "to_rgb",
    "visible_extra",
    "window_range",
]
