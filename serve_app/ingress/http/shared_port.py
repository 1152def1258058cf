"""Ingresses of one fleet share a port of their machine by SO_REUSEPORT; an ingress of another application would get half of their requests.

The kernel lets every process of the same user share a port that is shared already. So before an ingress listens, it asks which fleet
answers on the port.
"""

import hashlib
import logging

import httpx

from serve_app.config import IngressSettings
from serve_app.errors import ListenFailed

logger = logging.getLogger(__name__)

_ANSWER_LIMIT_S = 10.0


def fleet_id(application: str, ray_address: str) -> str:
    """Return the id that `/healthz` reports at all ingresses of one application, and at no ingress of another application."""
    return hashlib.sha256(f"{application}@{ray_address}".encode()).hexdigest()[:16]


async def refuse_another_fleets_port(ingress: IngressSettings, own_id: str) -> None:
    """Ask the process that listens on this port of the machine which fleet it belongs to.

    A process that does not answer is tolerated: it may be an ingress of this fleet that hangs, and that the new ingress will replace.

    Raises:
        ListenFailed: The process is not an ingress of the fleet with ``own_id``.
    """
    url = f"{ingress.local_url}/healthz"
    try:
        # verify=False: there is no TLS here, and loading the certificates costs 50 ms of CPU.
        async with httpx.AsyncClient(timeout=_ANSWER_LIMIT_S, verify=False, trust_env=False) as client:
            answer = (await client.get(url)).json()
    except httpx.ConnectError:
        return
    except httpx.TimeoutException:
        logger.warning("%s does not answer within %g s; listening beside it", url, _ANSWER_LIMIT_S)
        return
    except (httpx.HTTPError, ValueError):  # not HTTP, or not JSON
        answer = None
    if not isinstance(answer, dict) or answer.get("fleet") != own_id:
        raise ListenFailed(host=ingress.host, port=ingress.port, reason="another application answers there")
