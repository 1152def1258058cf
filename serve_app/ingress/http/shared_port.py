"""Ingresses of one fleet share a port of their machine by SO_REUSEPORT; another application's would get half of their requests.

The kernel lets every process of the same user share a port that is shared already, so an ingress asks who answers there before it listens.
"""

import hashlib
import logging

import httpx

from serve_app.config import IngressSettings
from serve_app.errors import ListenFailed

logger = logging.getLogger(__name__)

_ANSWER_LIMIT_S = 10.0


def fleet_id(application: str, ray_address: str) -> str:
    """Return what `/healthz` of all ingresses of an application tells, and no other application's on this machine or elsewhere."""
    return hashlib.sha256(f"{application}@{ray_address}".encode()).hexdigest()[:16]


async def refuse_another_fleets_port(ingress: IngressSettings, own_id: str) -> None:
    """Ask whoever listens on the port of this machine which fleet it belongs to.

    Who does not answer is let be: it may be an ingress of this fleet that hangs, which this one is to replace.

    Raises:
        ListenFailed: It is not an ingress of the fleet with ``own_id``.
    """
    url = f"{ingress.local_url}/healthz"
    try:
        # verify: there is no TLS, and to load the certificates costs 50 ms of CPU.
        async with httpx.AsyncClient(timeout=_ANSWER_LIMIT_S, verify=False, trust_env=False) as client:
            told = (await client.get(url)).json()
    except httpx.ConnectError:
        return
    except httpx.TimeoutException:
        logger.warning("%s does not answer within %g s; listening beside it", url, _ANSWER_LIMIT_S)
        return
    except (httpx.HTTPError, ValueError):  # not HTTP, or not JSON
        told = None
    if not isinstance(told, dict) or told.get("fleet") != own_id:
        raise ListenFailed(host=ingress.host, port=ingress.port, reason="another application answers there")
