"""What a frame of an engine's outputs needs before the fleet sees it."""

from typing import Any

from serve_app.protocol.connection import IngressConnection


def take_in(frame: Any, connection: IngressConnection, now: float) -> bool:
    """Give the times of vLLM's ``EngineCoreOutputs`` by this machine's clock, and end what has finished on its link.

    The monotonic times of the engine's machine mean nothing here: vLLM subtracts them from the ingress's.

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
