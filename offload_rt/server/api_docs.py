"""/openapi.json and /docs: a description of the routes, and a page without scripts."""

import json
from html import escape

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from offload_rt.server.bodies import Json

_REFERENCE = "#/components/schemas/"
_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>offload_rt API</title>
<meta name="viewport" content="width=device-width"><link rel="stylesheet" href="/page/style.css">
<style>body { max-width: 60rem; margin: auto; padding: 1rem; overflow: auto }
td { padding-right: 2rem }</style>
<h1>API</h1><p><a href="/openapi.json">openapi.json</a></p>
"""


# 4XX responses of a route.
REFUSAL: Json = {"4XX": {"description": "Refused request", "content": {"application/json": {}}}}


def body_of(kind: type[BaseModel]) -> Json:
    """Describe a request body and the types of its responses, for a route's `openapi_extra`."""
    schema = kind.model_json_schema(ref_template=_REFERENCE + "{model}")
    types = ["application/json", *(["text/event-stream"] if "stream" in kind.model_fields else [])]
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"content": {name: {} for name in types}}, **REFUSAL},
    }


def add_docs(app: FastAPI) -> None:
    """Add both routes. The description covers the routes added so far."""
    description = app.openapi()
    schemas = description.setdefault("components", {}).setdefault("schemas", {})
    page = _HEAD
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            body = operation.get("requestBody")
            schema = body["content"]["application/json"]["schema"] if body else {}
            schemas |= schema.pop("$defs", {})
            page += _section(f"{method.upper()} {path}", operation.get("description", ""), schema)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Json:
        return description

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page)


def _section(name: str, text: str, schema: Json) -> str:
    """Describe an operation in HTML: its description, and the fields of the body."""
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code>{' (required)' if field in required else ''}</td>"
        f"<td><code>{escape(json.dumps(entry))}</code></td></tr>"
        for field, entry in schema.get("properties", {}).items()
    )
    return f"<h2>{escape(name)}</h2><p>{escape(text)}</p><table>{rows}</table>\n"
