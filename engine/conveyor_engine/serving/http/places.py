"""The routes by which gateways ask for a place, and give back one that they do not need."""

import asyncio
import contextlib

from starlette.requests import Request
from starlette.responses import Response

from conveyor_engine.errors import ConveyorEngineError
from conveyor_engine.serving.http.app_state import app_state
from conveyor_engine.serving.http.engine_response import client_left


async def ask_for_place(request: Request) -> Response:
    """GET /place: 204 once a place is kept for a request of this gateway. Raises Unavailable or Overloaded."""
    engine = app_state(request).engine
    engine.check_state()
    asking = asyncio.create_task(engine.places.ask())
    leaving = asyncio.create_task(client_left(request.receive))
    try:
        await asyncio.wait({asking, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if asking.done():
            asking.result()
            if leaving.done():
                engine.places.give_back()
    finally:
        for task in (asking, leaving):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConveyorEngineError):
                await task
    return Response(status_code=204)


async def give_place_back(request: Request) -> Response:
    """DELETE /place."""
    app_state(request).engine.places.give_back()
    return Response(status_code=204)
