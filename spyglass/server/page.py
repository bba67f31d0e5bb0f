"""The playground: one static page at `/`, and what it asks of us beside the public protocols: the plan of an image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from spyglass.config.fields import integer
from spyglass.errors import NotServedError, PromptError
from spyglass.prompt import contained_size, plan_image
from spyglass.server.exchange import Served

PAGE = Path(__file__).parent / "playground" / "index.html"
# everything of the page is in the page; images are what a person dropped on it
_RULES = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page_routes(served: Served) -> Sequence[Route]:
    """`/` and `/playground/plan?width=&height=`: how an image of that size becomes cells and tokens.

    The plan holds `resized` (w, h) pixels, `placed` (left, top, w, h) of the image inside them, `grid` (rows,
    columns) of cells with sides of `cell` pixels, the last of which may reach over the edge, and `tokens` of the block;
    404 for a model that takes no images.
    """
    page = PAGE.read_bytes()

    async def index(_: Request) -> Response:
        headers = {"content-security-policy": _RULES, "x-content-type-options": "nosniff"}
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    async def plan(request: Request) -> Response:
        vision = served.config.vision
        if vision is None:
            raise NotServedError("this model takes no images, so there is nothing to plan")
        try:
            width, height = (integer(request.query_params.get(name, "")) for name in ("width", "height"))
        except ValueError:
            raise PromptError("width and height are pixels, two integers") from None
        found = plan_image(width, height, vision)
        full_width, full_height = found.resized
        wide, high = found.resized if found.stretch else contained_size((width, height), found.resized)
        placed = (round((full_width - wide) * 0.5), round((full_height - high) * 0.5), wide, high)
        body = {
            "resized": found.resized,
            "placed": placed,
            "grid": found.llm_grid,
            "cell": vision.patch_size * vision.downsample_ratio,
            "tokens": found.num_tokens,
        }
        return JSONResponse(body)

    return [Route("/", index), Route("/playground/plan", plan)]
