"""What a frame of an engine's outputs needs before the fleet sees it."""

from typing import Any

from serve_app.protocol.connection import IngressConnection


def take_in(frame: Any, connection: IngressConnection, now: float) -> bool:
    """Make vLLM's ``EngineCoreOutputs`` as if they came from an engine on this machine, and end what has finished on its link.

    Times become those of this machine's clock: the monotonic times of the engine's machine mean nothing here, and vLLM subtracts them from
    the ingress's. ``engine_index`` becomes 0, the only engine for which vLLM's loggers have series here: to them the fleet is one engine.

    Returns:
        Whether some attempt has finished.
    """
    some_finished = False
    for output in frame.outputs:
        if output.finish_reason is not None:
            some_finished = True
            connection.attempt_finished(output.request_id)
        for event in output.events or ():
            event.timestamp += now - frame.timestamp
    frame.timestamp, frame.engine_index = now, 0
    return some_finished
