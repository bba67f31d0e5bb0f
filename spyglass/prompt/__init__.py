"""Text and pictures to ids and patches, without torch: usable in a front end, and fuzzed as one."""

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
from spyglass.prompt.digest import prompt_digest
from spyglass.prompt.image import cut, normalisation_table, normalise, patchify, resize
from spyglass.prompt.interop import (
    kinds_of_reference_ids,
    prompt_from_reference_ids,
    to_reference_ids,
    to_v41_ids,
    to_vllm_ids,
)
from spyglass.prompt.placeholder import resolve_placeholder
from spyglass.prompt.plan import contained_size, layout_block, plan_image, plan_patches
from spyglass.prompt.released import V4_VISION, V41_VISION
from spyglass.prompt.tokenizer import PromptTokenizer, load_tokenizer
from spyglass.prompt.tokens import ImagePlan, ImageSpan, Patches, Prompt, TokenKind
from spyglass.prompt.visibility import check_spans, is_legal_cut, legal_cuts, visible_extra, window_range

__all__ = [
    "CHAT_RULES",
    "IMAGE_POSITION",
    "PYTHON_LIMITS",
    "REFERENCE_RULES",
    "V4_VISION",
    "V41_VISION",
    "ChatOptions",
    "ImageLimits",
    "ImagePlan",
    "ImageSpan",
    "Part",
    "Patches",
    "ImageRef",
    "ImageRules",
    "Prompt",
    "PromptTokenizer",
    "RenderedChat",
    "TokenKind",
    "build_prompt",
    "check_spans",
    "contained_size",
    "cut",
    "encode_chat",
    "is_legal_cut",
    "kinds_of_reference_ids",
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
    "prompt_from_reference_ids",
    "render_chat",
    "resize",
    "resolve_placeholder",
    "to_reference_ids",
    "to_rgb",
    "to_v41_ids",
    "to_vllm_ids",
    "visible_extra",
    "window_range",
]
